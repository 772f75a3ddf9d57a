"""Backend `nccl`: dense weights to every worker, over gloo on CPU and NCCL on CUDA.

The public names are imported when they are first asked for: a trainer never imports the worker's side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightwire_nccl.engine import NCCLWeightTransferEngine as NCCLWeightTransferEngine
    from weightwire_nccl.messages import NCCLTrainerInitInfo as NCCLTrainerInitInfo
    from weightwire_nccl.messages import NCCLWeightTransferInitInfo as NCCLWeightTransferInitInfo
    from weightwire_nccl.messages import NCCLWeightTransferUpdateInfo as NCCLWeightTransferUpdateInfo
    from weightwire_nccl.trainer import NCCLTrainerWeightTransferEngine as NCCLTrainerWeightTransferEngine

_MODULES = {
    "NCCLTrainerInitInfo": "messages",
    "NCCLTrainerWeightTransferEngine": "trainer",
    "NCCLWeightTransferEngine": "engine",
    "NCCLWeightTransferInitInfo": "messages",
    "NCCLWeightTransferUpdateInfo": "messages",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
