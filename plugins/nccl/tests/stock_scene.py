"""The stock side of vLLM's NCCL wire, over gloo: a broadcaster for trainers, and workers, here or in ranks."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

from weightwire import reaper
from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta, dtype_from_name
from weightwire.source import ModuleSource, WeightSource, as_bytes
from weightwire.stock_packing import packed_broadcast_consumer
from weightwire.testing.pool_process import Rank
from weightwire.testing.pool_rank import at_tidy
from weightwire_nccl.broadcaster import Broadcaster
from weightwire_nccl.messages import NCCLTrainerInitInfo
from weightwire_nccl.stock import StockNCCLTrainer

State = dict[str, Any]
c10d: Any = distributed  # its stubs leave out what groups are built from
SECONDS = timedelta(seconds=6)
"""How long an operation of gloo, which cannot be aborted, goes on after its test."""


class Group:
    """One rank of a gloo group, in the order of operations that vLLM has."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = SECONDS
        options._threads = 2
        self._group = c10d.ProcessGroupGloo(c10d.PrefixStore("stock", store), rank, size, options)
        reaper.retain(self._group)
        self._works: list[Any] = []
        self._kept: list[torch.Tensor] = []
        self.closed = False

    def broadcast(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """From rank 0."""
        self._run(self._group.broadcast([as_bytes(tensor)], c10d.BroadcastOptions()), tensor, deadline)

    def all_reduce(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        self._run(self._group.allreduce([tensor], c10d.AllreduceOptions()), tensor, deadline)

    def _run(self, work: Any, tensor: torch.Tensor, deadline: Deadline) -> None:
        self._works, self._kept = [work], [tensor]
        while not reaper.settled(work, 0.02):
            deadline.check("gloo")
        work.wait()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            reaper.park([self._group], works=self._works, keep=self._kept)


def join(unique_id: bytes, rank: int, size: int) -> Group:
    """Become a worker's rank of the group, as vLLM's workers do."""
    host, _, port = unique_id.rstrip(b"\0").decode().partition(":")
    store = c10d.TCPStore(host, int(port), None, False, timeout=SECONDS)
    store.set(f"rank {rank}", "here")
    group = Group(store, rank, size)
    group.all_reduce(torch.ones(1), Deadline(30.0))
    return group


class GlooBroadcaster(Broadcaster):
    """Its id says where its store is."""

    def __init__(self, device: torch.device | None, window: int) -> None:
        self._store = c10d.TCPStore("127.0.0.1", 0, None, True, timeout=SECONDS, wait_for_workers=False)
        self.unique_id = f"127.0.0.1:{self._store.port}".encode().ljust(128, b"\0")
        self.window = window
        self.log: list[Any] = []
        self._group: Group | None = None

    def connect(self, world_size: int, deadline: Deadline) -> None:
        self.log.append(f"connect {world_size}")
        # Asked for without waiting: a thread inside gloo could not be ended when nobody comes.
        while not self._store.check([f"rank {rank}" for rank in range(1, world_size)]):
            deadline.check("the workers to join")
            time.sleep(0.005)
        self._group = Group(self._store, 0, world_size)

    @property
    def group(self) -> Group:
        assert self._group is not None
        return self._group

    def warm_up(self, deadline: Deadline) -> None:
        self.log.append("warm up")
        self.group.all_reduce(torch.zeros(1), deadline)

    def send(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        self.log.append((tensor.dtype, tensor.numel()))
        self.group.broadcast(tensor, deadline)

    def flush(self, deadline: Deadline) -> None:
        self.log.append("flush")

    def abort(self) -> None:
        self.log.append("abort")
        if self._group is not None:
            self._group.close()


class GlooTrainer(StockNCCLTrainer):
    """A trainer on vLLM's NCCL wire that needs no GPU."""

    broadcasters: list[GlooBroadcaster]

    def make_broadcaster(self, device: torch.device | None, window: int) -> Broadcaster:
        self.broadcasters = [*getattr(self, "broadcasters", []), GlooBroadcaster(device, window)]
        return self.broadcasters[-1]

    @property
    def log(self) -> list[Any]:
        """What the present broadcaster did."""
        return self.broadcasters[-1].log


class StockWorker:
    """What one of vLLM's workers does, and a client that drives it: the four methods, and nothing else.

    Args:
        place: Which worker.
        fail: The call that raises instead.
    """

    def __init__(self, place: int = 0, *, fail: str | None = None) -> None:
        self.place = place
        self.fail = fail
        self.calls: list[str] = []
        self.init_info: dict[str, Any] = {}
        self.update_info: dict[str, Any] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.loads: list[int] = []
        self.group: Group | None = None
        self.deadline = Deadline(30.0)

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.fail == call:
            raise RuntimeError(f"{call} failed with 404")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.init_info = init_info
        self._note("init")
        unique_id = base64.b64decode(init_info["nccl_unique_id_b64"])
        self.group = join(unique_id, init_info["rank_offset"] + self.place, init_info["world_size"])

    def start_weight_update(self) -> None:
        self._note("start")

    def update_weights(self, update_info: Any) -> None:
        self.update_info = update_info
        self._note("update")
        columns = (update_info[key] for key in ("names", "dtype_names", "shapes"))
        metas = [
            ParamMeta(name, dtype_from_name(dtype), tuple(shape)) for name, dtype, shape in zip(*columns, strict=True)
        ]
        assert self.group is not None
        if self.init_info["packed"]:
            limit = self.init_info["packed_buffer_size_bytes"]
            packed_broadcast_consumer(metas, self._receive, self._load, buffer_size_bytes=limit)
        else:
            for meta in metas:
                tensor = torch.empty(meta.shape, dtype=meta.dtype)
                self._receive(tensor)
                self._load([(meta.name, tensor)])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._note("finish" if weight_version is None else f"finish {weight_version}")

    def _receive(self, tensor: torch.Tensor) -> None:
        assert self.group is not None
        self.group.broadcast(tensor, self.deadline)

    def _load(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.loads.append(len(pairs))
        self.weights |= {name: tensor.clone() for name, tensor in pairs}

    def close(self) -> None:
        if self.group is not None:
            self.group.close()


class Counting(StockWorker):
    """One whose client also tells how many there are, and can leave."""

    def get_world_size(self, include_dp: bool = True) -> int:
        return 1

    def shutdown_weight_transfer_engine(self) -> None:
        self._note("shutdown")
        self.close()


# A worker in a rank of its own


def worker_call(state: State, place: int, method: str, *args: Any) -> None:
    """One control call."""
    if "worker" not in state:
        state["worker"] = StockWorker(place)
        at_tidy(state["worker"].close)
    getattr(state["worker"], method)(*args)


def worker_state(state: State) -> tuple[list[str], dict[str, Any], dict[str, torch.Tensor]]:
    """What it was called, told and sent."""
    worker = state["worker"]
    return worker.calls, worker.init_info, worker.weights


class Server:
    """A client of a server with a worker in each of some ranks."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    def _all(self, method: str, *args: Any) -> None:
        pending = [rank.start(worker_call, place, method, *args) for place, rank in enumerate(self._ranks)]
        for call in pending:
            call.result()

    def get_world_size(self, include_dp: bool = True) -> int:
        return len(self._ranks)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", weight_version)


class Mixed(nn.Module):
    """Wider dtypes first, so that no pack misaligns them; a scalar, an empty and a strided one."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.precise = nn.Parameter(torch.full((2, 2), value, dtype=torch.float64), requires_grad=False)
        self.wide = nn.Parameter(torch.arange(20.0).reshape(5, 4).add(value).t(), requires_grad=False)
        self.hollow = nn.Parameter(torch.empty(0, 4), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(value), requires_grad=False)
        self.brief = nn.Parameter(torch.full((3,), value).to(torch.bfloat16), requires_grad=False)
        self.flags = nn.Parameter(torch.full((3,), int(value), dtype=torch.int8), requires_grad=False)


def trainer(client: Any, source: WeightSource | nn.Module, **info: Any) -> GlooTrainer:
    """A trainer engine on vLLM's wire."""
    if isinstance(source, nn.Module):
        source = ModuleSource(source)
    options = {"timeout": 20.0, **info}
    return GlooTrainer.trainer_init(NCCLTrainerInitInfo(wire="vllm", **options), client=client, source=source)


def same(weights: dict[str, torch.Tensor], model: nn.Module) -> bool:
    """Whether these are a model's parameters."""
    own = dict(model.named_parameters())
    return list(weights) == list(own) and all(torch.equal(weights[name], own[name]) for name in own)
