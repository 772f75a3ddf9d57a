"""weightwire moves the weights of a model being trained into the processes serving it.

The public names are imported when they are first asked for: `import weightwire` alone imports no torch and
looks at no other distribution.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from weightwire import errors as errors
    from weightwire.clients.fanout import FanoutClient as FanoutClient
    from weightwire.clients.http import HTTPVLLMWeightSyncClient as HTTPVLLMWeightSyncClient
    from weightwire.clients.local import LocalClient as LocalClient
    from weightwire.clients.protocol import VLLMWeightSyncClient as VLLMWeightSyncClient
    from weightwire.deadline import Deadline as Deadline
    from weightwire.engine import WeightTransferEngine as WeightTransferEngine
    from weightwire.errors import WeightwireError as WeightwireError
    from weightwire.gate import Gate as Gate
    from weightwire.hookspecs import Availability as Availability
    from weightwire.hookspecs import TransportSpec as TransportSpec
    from weightwire.hookspecs import hookimpl as hookimpl
    from weightwire.layout import Box as Box
    from weightwire.layout import ParamMeta as ParamMeta
    from weightwire.layout import Placement as Placement
    from weightwire.layout import Replicate as Replicate
    from weightwire.layout import Shard as Shard
    from weightwire.layout import layerwise_groups as layerwise_groups
    from weightwire.load_plan import LoadPlan as LoadPlan
    from weightwire.loader_sink import LoaderSink as LoaderSink
    from weightwire.messages import ParallelConfig as ParallelConfig
    from weightwire.messages import TrainerInitInfo as TrainerInitInfo
    from weightwire.messages import WeightTransferConfig as WeightTransferConfig
    from weightwire.messages import WeightTransferInitInfo as WeightTransferInitInfo
    from weightwire.messages import WeightTransferInitRequest as WeightTransferInitRequest
    from weightwire.messages import WeightTransferUpdateInfo as WeightTransferUpdateInfo
    from weightwire.messages import WeightTransferUpdatePayload as WeightTransferUpdatePayload
    from weightwire.messages import WeightTransferUpdateRequest as WeightTransferUpdateRequest
    from weightwire.module_sink import ModuleSink as ModuleSink
    from weightwire.recording import record_loads as record_loads
    from weightwire.registry import WeightTransferEngineFactory as WeightTransferEngineFactory
    from weightwire.registry import WeightTransferTrainerFactory as WeightTransferTrainerFactory
    from weightwire.rendezvous import Rendezvous as Rendezvous
    from weightwire.report import TransferReport as TransferReport
    from weightwire.sink import UpdateSpec as UpdateSpec
    from weightwire.sink import WeightSink as WeightSink
    from weightwire.sink import as_sink as as_sink
    from weightwire.source import ModuleSource as ModuleSource
    from weightwire.source import StateDictSource as StateDictSource
    from weightwire.source import WeightSource as WeightSource
    from weightwire.trainer import TrainerWeightTransferEngine as TrainerWeightTransferEngine
    from weightwire.worker import Worker as Worker

__version__: Final = "0.1.0"

API_VERSION: Final = (1, 0)
"""Version of the hooks, engines and sinks that a transport is written against; not a package's version."""

_NAMES: Final = {
    "clients.fanout": "FanoutClient",
    "clients.http": "HTTPVLLMWeightSyncClient",
    "clients.local": "LocalClient",
    "clients.protocol": "VLLMWeightSyncClient",
    "deadline": "Deadline",
    "engine": "WeightTransferEngine",
    "errors": "WeightwireError",
    "gate": "Gate",
    "hookspecs": "Availability TransportSpec hookimpl",
    "layout": "Box ParamMeta Placement Replicate Shard layerwise_groups",
    "load_plan": "LoadPlan",
    "loader_sink": "LoaderSink",
    "messages": "ParallelConfig TrainerInitInfo WeightTransferConfig WeightTransferInitInfo"
    " WeightTransferInitRequest WeightTransferUpdateInfo WeightTransferUpdatePayload"
    " WeightTransferUpdateRequest",
    "module_sink": "ModuleSink",
    "recording": "record_loads",
    "registry": "WeightTransferEngineFactory WeightTransferTrainerFactory",
    "rendezvous": "Rendezvous",
    "report": "TransferReport",
    "sink": "UpdateSpec WeightSink as_sink",
    "source": "ModuleSource StateDictSource WeightSource",
    "trainer": "TrainerWeightTransferEngine",
    "worker": "Worker",
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["API_VERSION", "__version__", "errors", *_MODULES]


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("weightwire.errors")
    if name == "RayVLLMWeightSyncClient":
        return _from_plugin(name, "weightwire-rdt")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def _from_plugin(name: str, distribution: str) -> object:
    module = distribution.replace("-", "_")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ImportError(f"{name} comes with another distribution: pip install {distribution}") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
