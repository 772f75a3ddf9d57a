"""What ranks do in a benchmark from shards to tensor-parallel workers, whatever the transport; for `Rank.call`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weightwire.clients.fanout import FanoutClient
from weightwire.messages import TrainerInitInfo
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import as_bytes
from weightwire.testing.payload import Payload
from weightwire.testing.pool import held_socket
from weightwire.testing.sharded_payload import ShardedSource, TensorParallel, original
from weightwire.testing.worker_host import WorkerHost
from weightwire.testing.workers import RankClient
from weightwire.worker import Worker

State = dict[str, Any]
SECRET = "3c" * 16


def take_seat(state: State, payload: Payload, rank: int, trainers: int, workers: int) -> str | None:
    """Make this rank's part of the model: trainer ranks come first; returns a worker's address."""
    torch.set_num_threads(1)
    state.update(payload=payload, rank=rank, trainers=trainers, workers=workers)
    if rank < trainers:
        state["source"] = ShardedSource(payload, rank, trainers)
        return None
    place = rank - trainers
    state["model"] = model = TensorParallel(payload, place, workers)
    state["expected"] = expected = TensorParallel(payload, place, workers)
    expected.load_weights((name, original(payload, at)) for at, name in enumerate(payload.names))
    state["host"] = host = WorkerHost(Worker(model))
    address: str = host.address
    return address


def hold_port(state: State) -> int:
    """A port that this rank holds until its trainer listens on it."""
    state["held"] = held = held_socket()
    return int(held.getsockname()[1])


def connect(state: State, addresses: Sequence[str], port: int, info: type[TrainerInitInfo], **fields: Any) -> None:
    """Open the link, on a trainer rank.

    Args:
        state: Of the rank.
        addresses: Of the workers.
        port: Of rank 0's rendezvous.
        info: Of the transport.
        fields: More of its fields.
    """
    clients = [RankClient([address], [f"worker {place}"]) for place, address in enumerate(addresses)]
    made = info(
        rank=state["rank"],
        num_trainer_ranks=state["trainers"],
        secret=SECRET,
        master_port=port,
        listen_socket=state.get("held"),
        **fields,
    )
    state["trainer"] = WeightTransferTrainerFactory.trainer_init(
        made, client=FanoutClient(clients), source=state["source"]
    )


def refresh(state: State) -> None:
    """Change every byte of the model, and of what it will be compared with."""
    tensors = state["source"].shards if "source" in state else state["expected"].parameters()
    for tensor in tensors:
        as_bytes(tensor).add_(1)


def timed(
    state: State, step: Callable[[State], Mapping[str, Any] | None], at: float
) -> tuple[float, float, Mapping[str, Any]]:
    """One step, beginning at `at`; returns when it began and ended, and its figures."""
    time.sleep(max(0.0, at - time.monotonic()))
    began = time.monotonic()
    figures = step(state)
    return began, time.monotonic(), figures or {}


def send(state: State) -> dict[str, Any] | None:
    """A round of `send_weights`, on a trainer rank."""
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


def equal(state: State) -> bool:
    """Whether a worker's model has exactly what the trainer ranks have."""
    return "model" not in state or same(state["model"], state["expected"])


def same(model: torch.nn.Module, expected: torch.nn.Module) -> bool:
    """Whether two models have the same bits."""
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return all(torch.equal(as_bytes(here.data), as_bytes(there.data)) for here, there in pairs)


def close(state: State) -> None:
    """Leave."""
    if "trainer" in state:
        state["trainer"].shutdown()
    if "host" in state:
        state["host"].close()
