"""What the ranks of the benchmark do: trainer ranks, then workers, each in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from weightwire.testing import sharded_ranks as ranks
from weightwire.testing.payload import Payload
from weightwire.testing.sharded_payload import TensorParallel, metadata_of

State = dict[str, Any]
_TIMEOUT = timedelta(seconds=120)


def sit(state: State, payload: Payload, rank: int, trainers: int, workers: int, directory: str) -> str | None:
    """Make this rank's part of the model; returns a worker's address."""
    address = ranks.take_seat(state, payload, rank, trainers, workers)
    state["group"] = _group(f"{directory}/all", rank, trainers + workers)
    if rank < trainers:
        state["gather"] = _group(f"{directory}/trainers", rank, trainers)
        if rank == 0:
            state["broadcast"] = _group(f"{directory}/broadcast", 0, 1 + workers)
        return None
    place = rank - trainers
    state["broadcast"] = _group(f"{directory}/broadcast", 1 + place, 1 + workers)
    state["loaded"] = TensorParallel(payload, place, workers)  # where the naive way loads
    return address


def _group(path: str, rank: int, world: int) -> Any:
    gloo: Any = torch.distributed.ProcessGroupGloo  # torch's stubs know neither its options nor its operations
    options = gloo._Options()
    options._timeout = _TIMEOUT
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(FileStore(path, world), rank, world, options)


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


def step(state: State, way: str, at: float) -> tuple[float, float, Mapping[str, Any]]:
    """One timed step, beginning at `at`; returns when it began and ended, and figures."""
    return ranks.timed(state, _WAYS[way], at)


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


_WAYS = {"m2n": ranks.send, "raw": _raw, "gather_broadcast": _gather_broadcast}


def equal(state: State, way: str) -> bool:
    """Whether a worker has exactly what the trainer ranks have; raw bytes mean nothing and always are."""
    if way == "raw" or "model" not in state:
        return True
    return ranks.equal(state) if way == "m2n" else ranks.same(state["loaded"], state["expected"])
