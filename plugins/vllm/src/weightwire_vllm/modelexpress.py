"""vLLM's `modelexpress` backend, which the ModelExpress project maintains: re-exported, imported when asked for."""

from __future__ import annotations

import importlib
from typing import Final

_NAMES: Final = (
    "ModelExpressWeightTransferEngine",
    "ModelExpressWeightTransferInitInfo",
    "ModelExpressWeightTransferUpdateInfo",
)
_MODULE: Final = "modelexpress_rl.inference.engines.vllm.weight_transfer_engine"

__all__ = list(_NAMES)


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULE), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("modelexpress", "modelexpress_rl"):
            raise
        raise ImportError(
            f"{name} comes with ModelExpress: pip install 'git+https://github.com/ai-dynamo/modelexpress@main"
            "#subdirectory=modelexpress_client/python'"
        ) from error
