"""weightwire's host in vLLM: any transport, all or nothing, in a stock server.

The names here need no vLLM; what runs inside of it is in `engine`, `engine_core` and `sink`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from weightwire_vllm.local import LocalLLMClient as LocalLLMClient
    from weightwire_vllm.plugin import register as register

_MODULES: Final = {"LocalLLMClient": "local", "register": "plugin"}

__all__ = ["LocalLLMClient", "register"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
