"""A stock trainer and a stock receiver without a GPU: what would be exported lies in this process's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plugins.ipc.tests.golden import UUID, arguments, storage_fields
from weightwire.deadline import Deadline
from weightwire.messages import WeightTransferConfig
from weightwire.source import ModuleSource, WeightSource
from weightwire_ipc.engine import IPCWeightTransferEngine
from weightwire_ipc.handles import HandleArguments
from weightwire_ipc.messages import IPCTrainerInitInfo, IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
from weightwire_ipc.stock import StockIPCTrainer
from weightwire_ipc.stock_exporter import StockExporter
from weightwire_ipc.stock_reception import StockReception
from weightwire_ipc.storage_handle import StorageHandle

CPU = torch.device("cpu")


class HostExporter(StockExporter):
    """Exports memory of this process under numbers, all of them for the GPU `uuid`."""

    exported: dict[int, torch.UntypedStorage] = {}  # noqa: RUF012 - one table for the whole process, as the GPU is

    def __init__(self, uuid: str = UUID) -> None:
        super().__init__()
        self._uuid = uuid
        self.log: list[str] = []

    def allocate(self, size: int, device: torch.device | None) -> torch.Tensor:
        self.log.append("allocate")
        return torch.empty(size, dtype=torch.uint8)

    def export(self, tensor: torch.Tensor) -> tuple[str, HandleArguments]:
        self.log.append("export")
        storage, stored = tensor.untyped_storage(), None
        if storage.nbytes():
            number = len(self.exported)
            self.exported[number] = storage
            stored = StorageHandle(**storage_fields(storage.nbytes(), number=number))
        offset, stride = int(tensor.storage_offset()), tensor.stride()
        return self._uuid, HandleArguments(tuple(tensor.shape), stride, offset, tensor.dtype, 3, stored)

    def fence(self) -> None:
        self.log.append("fence")

    def release(self) -> None:
        self.log.append("release")
        super().release()


class HostTrainer(StockIPCTrainer):
    """A stock trainer whose exporter needs no GPU."""

    exporter: HostExporter

    def make_exporter(self) -> StockExporter:
        self.exporter = HostExporter()
        return self.exporter


class HostReception(StockReception):
    """Imports what `HostExporter` exported; counts imports."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.imports = 0

    def uuid(self) -> str:
        return UUID

    def rebuild(self, handle: HandleArguments) -> torch.Tensor:
        self.imports += 1
        tensor = torch.empty(0, dtype=handle.dtype)
        if handle.storage is None:
            return tensor.view(handle.size)
        storage = HostExporter.exported[handle.storage.ref_counter_offset]
        return tensor.set_(storage, handle.offset, handle.size, handle.stride)

    def settle(self) -> None:
        return None


class StockEngine(IPCWeightTransferEngine):
    """The worker's engine, on a machine without a GPU."""

    reception: HostReception

    def connect(self, init_info: IPCWeightTransferInitInfo, deadline: Deadline) -> None:
        self._stock = self.reception = HostReception(self.device)


class Recorder:
    """A client of the reference: four methods and nothing else; hands on to an engine if it has one.

    Args:
        engine: Driven bare.
        fail: The call that fails.
    """

    def __init__(self, engine: StockEngine | None = None, *, fail: str | None = None) -> None:
        self.engine = engine
        self.fail = fail
        self.calls: list[str] = []
        self.messages: list[Any] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail:
            raise RuntimeError(f"{call} failed with 404")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.messages.append(init_info)
        self._note("init")
        if self.engine is not None:
            self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self._note("start")
        if self.engine is not None:
            self.engine.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.messages.append(update_info)
        self._note("update")
        if self.engine is not None:
            self.engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._note("finish" if weight_version is None else f"finish {weight_version}")
        if self.engine is not None:
            self.engine.finish_weight_update()


class Mixed(nn.Module):
    """Narrow parameters of odd sizes before wide ones, so that a packed buffer misaligns them; an empty one."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.full((3,), value).to(torch.bfloat16), requires_grad=False)
        self.wide = nn.Parameter(torch.full((4, 5), value), requires_grad=False)
        self.hollow = nn.Parameter(torch.empty(0, 4), requires_grad=False)
        self.flags = nn.Parameter(torch.full((3,), int(value), dtype=torch.int8), requires_grad=False)
        self.last = nn.Parameter(torch.full((2, 2), value, dtype=torch.float64), requires_grad=False)


class Tied(Mixed):
    """With a tied parameter and a persistent buffer."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__(value)
        self.again = self.wide
        self.register_buffer("running", torch.full((2,), value))


class Loading(nn.Module):
    """A model that loads by itself, as vLLM's do."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.full((6,), value), requires_grad=False)

    def load_weights(self, pairs: Any) -> None:
        for name, tensor in pairs:
            start = {"first": 0, "second": 3}[name]
            self.fused[start : start + 3].copy_(tensor)


def trainer(client: Any, source: WeightSource | nn.Module, **info: Any) -> HostTrainer:
    if isinstance(source, nn.Module):
        source = ModuleSource(source)
    return HostTrainer.trainer_init(IPCTrainerInitInfo(wire="vllm", **info), client=client, source=source)


def engine(model: nn.Module) -> StockEngine:
    return StockEngine(WeightTransferConfig(backend="ipc"), None, CPU, model)


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def packed_update(pairs: list[tuple[str, torch.Tensor]], handles: dict[str, Any], **more: Any) -> Any:
    """A packed message of vLLM's about these parameters."""
    fields = {
        "names": [name for name, _ in pairs],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in pairs],
        "shapes": [list(tensor.shape) for _, tensor in pairs],
        "ipc_handles": {uuid: one.arguments() for uuid, one in handles.items()},
        "tensor_sizes": [tensor.nbytes for _, tensor in pairs],
    }
    return message(**(fields | more))


def message(**fields: Any) -> IPCWeightTransferUpdateInfo:
    """A message of vLLM's; about one parameter `a` unless it says otherwise."""
    one = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 3]], "ipc_handles": [{UUID: arguments()}]}
    given: dict[str, Any] = one | fields
    return IPCWeightTransferUpdateInfo(**given)
