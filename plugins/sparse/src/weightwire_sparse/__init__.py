"""Backend `sparse_nccl`: what changed since the weights that the workers last acknowledged, and nothing else.

The public names are imported when they are first asked for: a trainer never imports the worker's side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightwire_sparse.engine import SparseNCCLWeightTransferEngine as SparseNCCLWeightTransferEngine
    from weightwire_sparse.messages import SparseNCCLTrainerInitInfo as SparseNCCLTrainerInitInfo
    from weightwire_sparse.messages import SparseNCCLWeightTransferInitInfo as SparseNCCLWeightTransferInitInfo
    from weightwire_sparse.messages import SparseNCCLWeightTransferUpdateInfo as SparseNCCLWeightTransferUpdateInfo
    from weightwire_sparse.patches import SparseWeightPatch as SparseWeightPatch
    from weightwire_sparse.tracker import DeltaTracker as DeltaTracker
    from weightwire_sparse.trainer import (
        SparseNCCLTrainerWeightTransferEngine as SparseNCCLTrainerWeightTransferEngine,
    )

_MODULES = {
    "DeltaTracker": "tracker",
    "SparseNCCLTrainerInitInfo": "messages",
    "SparseNCCLTrainerWeightTransferEngine": "trainer",
    "SparseNCCLWeightTransferEngine": "engine",
    "SparseNCCLWeightTransferInitInfo": "messages",
    "SparseNCCLWeightTransferUpdateInfo": "messages",
    "SparseWeightPatch": "patches",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
