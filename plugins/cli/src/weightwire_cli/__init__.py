"""Commands that core's `weightwire` script finds through the entry-point group `weightwire.commands`.

`SafetensorsSource` and `SelectedSource` are sources of weights for any trainer; they are imported when asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightwire_cli.checkpoint import SafetensorsSource as SafetensorsSource
    from weightwire_cli.selection import SelectedSource as SelectedSource

_MODULES = {"SafetensorsSource": "checkpoint", "SelectedSource": "selection"}

__all__ = ["SafetensorsSource", "SelectedSource"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
