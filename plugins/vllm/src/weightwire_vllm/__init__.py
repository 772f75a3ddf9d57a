"""weightwire's host in vLLM: any transport, all or nothing, in a stock server."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from weightwire_vllm.engine import HostedEngine as HostedEngine
    from weightwire_vllm.local import LocalLLMClient as LocalLLMClient
    from weightwire_vllm.plugin import register as register
    from weightwire_vllm.sink import VLLMSink as VLLMSink

_MODULES: Final = {"HostedEngine": "engine", "LocalLLMClient": "local", "VLLMSink": "sink", "register": "plugin"}

__all__ = ["HostedEngine", "LocalLLMClient", "VLLMSink", "register"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
