"""Backend `sharded_rdt`: workers pull exactly the regions that they load, on Ray.

The public names are imported when they are first asked for: a trainer never imports the worker's side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightwire_rdt.client import RayVLLMWeightSyncClient as RayVLLMWeightSyncClient
    from weightwire_rdt.engine import ShardedRDTWeightTransferEngine as ShardedRDTWeightTransferEngine
    from weightwire_rdt.messages import ShardedRDTTrainerInitInfo as ShardedRDTTrainerInitInfo
    from weightwire_rdt.messages import ShardedRDTWeightTransferInitInfo as ShardedRDTWeightTransferInitInfo
    from weightwire_rdt.messages import ShardedRDTWeightTransferUpdateInfo as ShardedRDTWeightTransferUpdateInfo
    from weightwire_rdt.placement import Room as Room
    from weightwire_rdt.trainer import ShardedRDTTrainerWeightTransferEngine as ShardedRDTTrainerWeightTransferEngine
    from weightwire_rdt.worker_actor import WorkerActor as WorkerActor
    from weightwire_rdt.worker_group import RayWorkerGroup as RayWorkerGroup

_MODULES = {
    "RayVLLMWeightSyncClient": "client",
    "RayWorkerGroup": "worker_group",
    "Room": "placement",
    "ShardedRDTTrainerInitInfo": "messages",
    "ShardedRDTTrainerWeightTransferEngine": "trainer",
    "ShardedRDTWeightTransferEngine": "engine",
    "ShardedRDTWeightTransferInitInfo": "messages",
    "ShardedRDTWeightTransferUpdateInfo": "messages",
    "WorkerActor": "worker_actor",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
