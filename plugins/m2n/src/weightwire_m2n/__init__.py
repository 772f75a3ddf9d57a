"""Backend `nccl_m2n`: from M trainer ranks to N worker ranks, each byte crossing once.

The public names are imported when they are first asked for: a trainer never imports the worker's side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightwire_m2n.engine import M2NWeightTransferEngine as M2NWeightTransferEngine
    from weightwire_m2n.messages import M2NTrainerInitInfo as M2NTrainerInitInfo
    from weightwire_m2n.messages import M2NWeightTransferInitInfo as M2NWeightTransferInitInfo
    from weightwire_m2n.messages import M2NWeightTransferUpdateInfo as M2NWeightTransferUpdateInfo
    from weightwire_m2n.trainer import M2NTrainerWeightTransferEngine as M2NTrainerWeightTransferEngine

_MODULES = {
    "M2NTrainerInitInfo": "messages",
    "M2NTrainerWeightTransferEngine": "trainer",
    "M2NWeightTransferEngine": "engine",
    "M2NWeightTransferInitInfo": "messages",
    "M2NWeightTransferUpdateInfo": "messages",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
