"""Backend `sharded_rdt`: workers pull exactly the regions that they load, on Ray.

The public names are imported when they are first asked for: a trainer never imports the worker's side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightwire_rdt.engine import ShardedRDTWeightTransferEngine as ShardedRDTWeightTransferEngine
    from weightwire_rdt.messages import ShardedRDTTrainerInitInfo as ShardedRDTTrainerInitInfo
    from weightwire_rdt.messages import ShardedRDTWeightTransferInitInfo as ShardedRDTWeightTransferInitInfo
    from weightwire_rdt.messages import ShardedRDTWeightTransferUpdateInfo as ShardedRDTWeightTransferUpdateInfo
    from weightwire_rdt.trainer import ShardedRDTTrainerWeightTransferEngine as ShardedRDTTrainerWeightTransferEngine

_MODULES = {
    "ShardedRDTTrainerInitInfo": "messages",
    "ShardedRDTTrainerWeightTransferEngine": "trainer",
    "ShardedRDTWeightTransferEngine": "engine",
    "ShardedRDTWeightTransferInitInfo": "messages",
    "ShardedRDTWeightTransferUpdateInfo": "messages",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
