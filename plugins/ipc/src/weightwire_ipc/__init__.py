"""Backend `ipc`: weights between processes of one host, through shared memory or CUDA IPC.

The public names are imported when they are first asked for: a trainer never imports the worker's side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightwire_ipc.engine import IPCWeightTransferEngine as IPCWeightTransferEngine
    from weightwire_ipc.messages import IPCTrainerInitInfo as IPCTrainerInitInfo
    from weightwire_ipc.messages import IPCWeightTransferInitInfo as IPCWeightTransferInitInfo
    from weightwire_ipc.messages import IPCWeightTransferUpdateInfo as IPCWeightTransferUpdateInfo
    from weightwire_ipc.sharing import share as share
    from weightwire_ipc.trainer import IPCTrainerWeightTransferEngine as IPCTrainerWeightTransferEngine

_MODULES = {
    "IPCTrainerInitInfo": "messages",
    "IPCTrainerWeightTransferEngine": "trainer",
    "IPCWeightTransferEngine": "engine",
    "IPCWeightTransferInitInfo": "messages",
    "IPCWeightTransferUpdateInfo": "messages",
    "share": "sharing",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
