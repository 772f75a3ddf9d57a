"""What the ranks of the benchmark do: trainer ranks, then workers, each in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from weightwire.clients.fanout import FanoutClient
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import as_bytes
from weightwire.testing.payload import Payload
from weightwire.testing.pool import held_socket
from weightwire.testing.worker_host import WorkerHost
from weightwire.testing.workers import RankClient
from weightwire.worker import Worker
from weightwire_m2n.bench_model import ShardedSource, TensorParallel, metadata_of, original
from weightwire_m2n.messages import M2NTrainerInitInfo

State = dict[str, Any]
SECRET = "3c" * 16
_TIMEOUT = timedelta(seconds=120)


def sit(state: State, payload: Payload, rank: int, trainers: int, workers: int, directory: str) -> str | None:
    """Make this rank's part of the model; returns a worker's address."""
    torch.set_num_threads(1)
    state.update(payload=payload, rank=rank, trainers=trainers, workers=workers)
    state["group"] = _group(f"{directory}/all", rank, trainers + workers)
    if rank < trainers:
        state["source"] = ShardedSource(payload, rank, trainers)
        state["gather"] = _group(f"{directory}/trainers", rank, trainers)
        if rank == 0:
            state["broadcast"] = _group(f"{directory}/broadcast", 0, 1 + workers)
        return None
    place = rank - trainers
    state["broadcast"] = _group(f"{directory}/broadcast", 1 + place, 1 + workers)
    state["model"] = model = TensorParallel(payload, place, workers)
    state["loaded"] = TensorParallel(payload, place, workers)  # where the naive way loads
    state["expected"] = expected = TensorParallel(payload, place, workers)
    expected.load_weights((name, original(payload, at)) for at, name in enumerate(payload.names))
    state["host"] = host = WorkerHost(Worker(model))
    address: str = host.address
    return address


def _group(path: str, rank: int, world: int) -> Any:
    gloo: Any = torch.distributed.ProcessGroupGloo  # torch's stubs know neither its options nor its operations
    options = gloo._Options()
    options._timeout = _TIMEOUT
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(FileStore(path, world), rank, world, options)


def hold_port(state: State) -> int:
    """A port that this rank holds until its trainer listens on it."""
    state["held"] = held = held_socket()
    return int(held.getsockname()[1])


def connect(state: State, addresses: Sequence[str], port: int) -> None:
    """Open the link, on a trainer rank."""
    clients = [RankClient([address], [f"worker {place}"]) for place, address in enumerate(addresses)]
    info = M2NTrainerInitInfo(
        rank=state["rank"],
        num_trainer_ranks=state["trainers"],
        secret=SECRET,
        master_port=port,
        listen_socket=state.get("held"),
    )
    state["trainer"] = WeightTransferTrainerFactory.trainer_init(
        info, client=FanoutClient(clients), source=state["source"]
    )


def make_buffers(state: State, traffic: Sequence[Sequence[int]]) -> None:
    """A buffer for what crosses between this rank and each peer, all pages touched."""
    trainers, rank = state["trainers"], state["rank"]
    column = rank - trainers
    sizes = (
        dict(enumerate(traffic[rank], trainers)) if rank < trainers else dict(enumerate(row[column] for row in traffic))
    )
    state["buffers"] = {peer: torch.zeros(nbytes, dtype=torch.uint8) for peer, nbytes in sizes.items() if nbytes}
    longest = max(torch.Size(shape).numel() for shape in state["payload"].shapes)
    if rank >= trainers or rank == 0:
        state["whole"] = torch.zeros(longest, dtype=state["payload"].dtype)
    if rank < trainers:
        state["gathered"] = torch.zeros(longest + trainers * 4096, dtype=state["payload"].dtype)


def refresh(state: State) -> None:
    """Change every byte of the model, and of what it will be compared with."""
    tensors = state["source"].shards if "source" in state else state["expected"].parameters()
    for tensor in tensors:
        as_bytes(tensor).add_(1)


def step(state: State, way: str, at: float) -> tuple[float, float, Mapping[str, Any]]:
    """One timed step, beginning at `at`; returns when it began and ended, and figures."""
    time.sleep(max(0.0, at - time.monotonic()))
    began = time.monotonic()
    figures = _WAYS[way](state)
    return began, time.monotonic(), figures or {}


def _m2n(state: State) -> dict[str, Any] | None:
    if "trainer" not in state:
        return None
    report = state["trainer"].send_weights()
    workers = [rank for rank in report.ranks if "commit" in rank.seconds]
    return {
        "path": report.path,
        "transfer_seconds": report.seconds["transfer"],
        "wire_bytes": sum(rank.bytes for rank in workers),
        "commit_milliseconds": 1e3 * max(rank.seconds["commit"] for rank in workers),
        "allocated_bytes": max(rank.details["allocated_bytes"] for rank in workers),
    }


def _raw(state: State) -> None:
    """The same bytes between the same ranks, one operation for each pair, all at once."""
    group = state["group"]
    start = group.send if state["rank"] < state["trainers"] else group.recv
    works = [start([buffer], peer, 0) for peer, buffer in state["buffers"].items()]
    for work in works:
        work.wait()


def _gather_broadcast(state: State) -> None:
    """Gather each parameter on all trainer ranks, as `full_tensor` does, then broadcast it from rank 0."""
    payload, trainers, rank = state["payload"], state["trainers"], state["rank"]

    def received() -> Any:
        for place, (name, meta) in enumerate(zip(payload.names, metadata_of(payload, trainers), strict=True)):
            whole = state["whole"][: meta.numel].view(meta.shape) if "whole" in state else None
            if rank < trainers:
                _gather(state, place, meta.shape, whole)
            if whole is not None:
                state["broadcast"].broadcast([whole.view(-1)], _from_first()).wait()
            yield name, whole

    if rank < trainers:
        for _ in received():
            pass
    else:
        with torch.no_grad():
            state["loaded"].load_weights(received())


def _gather(state: State, place: int, shape: Sequence[int], whole: Tensor | None) -> None:
    trainers, shard = state["trainers"], state["source"].shards[place]
    step = -(-shape[0] // trainers)
    row = torch.Size(shape[1:]).numel()
    if shard.shape[0] < step:  # every rank gives as much as the first
        padded = shard.new_zeros((step, *shape[1:]))
        padded[: shard.shape[0]] = shard
        shard = padded
    every = state["gathered"][: trainers * step * row]
    state["gather"]._allgather_base(every, shard.view(-1)).wait()
    if whole is not None:
        whole.view(-1).copy_(every[: whole.numel()])


def _from_first() -> Any:
    c10d: Any = torch.distributed
    options = c10d.BroadcastOptions()
    options.rootRank = 0
    return options


_WAYS = {"m2n": _m2n, "raw": _raw, "gather_broadcast": _gather_broadcast}


def equal(state: State, way: str) -> bool:
    """Whether a worker has exactly what the trainer ranks have; raw bytes mean nothing and always are."""
    if way == "raw" or "model" not in state:
        return True
    model = state["model"] if way == "m2n" else state["loaded"]
    pairs = zip(model.parameters(), state["expected"].parameters(), strict=True)
    return all(torch.equal(as_bytes(here.data), as_bytes(there.data)) for here, there in pairs)


def close(state: State) -> None:
    """Leave."""
    if "trainer" in state:
        state["trainer"].shutdown()
    if "host" in state:
        state["host"].close()
