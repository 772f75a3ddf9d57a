"""Backend `disk`: every update is a folder of safetensors files that trainers and workers share.

The public names are imported when they are first asked for: a trainer never imports the worker's side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightwire_disk.engine import DiskWeightTransferEngine as DiskWeightTransferEngine
    from weightwire_disk.messages import DiskTrainerInitInfo as DiskTrainerInitInfo
    from weightwire_disk.messages import DiskWeightTransferInitInfo as DiskWeightTransferInitInfo
    from weightwire_disk.trainer import DiskTrainerWeightTransferEngine as DiskTrainerWeightTransferEngine

_MODULES = {
    "DiskTrainerInitInfo": "messages",
    "DiskTrainerWeightTransferEngine": "trainer",
    "DiskWeightTransferEngine": "engine",
    "DiskWeightTransferInitInfo": "messages",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
