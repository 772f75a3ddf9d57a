"""What a rank does that trains, and drives workers in actors; and what those build."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.tests.sharded_models import Policy, Served, StepSource
from weightwire.deadline import Deadline
from weightwire.errors import PeerLost, WeightwireError
from weightwire.messages import ParallelConfig
from weightwire.registry import WeightTransferTrainerFactory
from weightwire_rdt import RayWorkerGroup, Room, ShardedRDTTrainerInitInfo, WorkerActor
from weightwire_rdt.cluster import join_cluster

State = dict[str, Any]


def served(parallel: ParallelConfig, device: torch.device, *, zeroed: bool) -> nn.Module:
    """The builder of a worker's model."""
    assert zeroed
    return Served(parallel.rank, parallel.tensor_parallel_size).to(device)


class Answering(WorkerActor):
    """A worker that answers with its model."""

    def process(self) -> int:
        return os.getpid()

    def norm(self) -> float:
        with self.worker.reading():
            return float(self.model.block0.norm.sum())


class HeldSource(StepSource):
    """Stops before its second parameter while `held` is set."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.held = False
        self.reached, self.go = threading.Event(), threading.Event()

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for place, pair in enumerate(super().iter_local()):
            if place == 1 and self.held:
                self.reached.set()
                assert self.go.wait(30)
            yield pair


def start(state: State, count: int, restarts: int = 0) -> None:
    """Start a group with room for it, and a trainer that is linked with it."""
    state["room"] = room = Room(count, strategy="STRICT_PACK")
    builder = f"{__name__}:served"
    state["group"] = group = RayWorkerGroup.start(
        builder,
        count,
        {"zeroed": True},
        actor=Answering,
        place=lambda rank: {**room.options(rank), "max_restarts": restarts},
        timeout=100,
    )
    state["source"] = HeldSource(Policy())
    state["trainer"] = WeightTransferTrainerFactory.trainer_init(
        ShardedRDTTrainerInitInfo(timeout=30, peer_timeout=3),
        client=RayWorkerGroup(group.actors),
        source=state["source"],
    )


def send(state: State, seed: int, label: str | None = None) -> dict[str, Any]:
    """One round; returns the report."""
    state["source"].seed = seed
    report: dict[str, Any] = state["trainer"].send_weights(weight_version=label).to_json()
    return report


def hold(state: State, held: bool) -> None:
    """Have the next round stop in the middle; or the present one, and the next, go on."""
    source = state["source"]
    source.held = held
    if not held:
        source.go.set()


def reached(state: State) -> None:
    """Wait until the round has stopped in the middle."""
    assert state["source"].reached.wait(30)


def ask(state: State, method: str, *arguments: Any, **keywords: Any) -> Any:
    """A call of the client's."""
    return getattr(state["group"], method)(*arguments, **keywords)


def ask_actors(state: State, method: str, *arguments: Any) -> list[Any]:
    """A call to each actor itself."""
    ray = join_cluster()
    return list(ray.get([getattr(one, method).remote(*arguments) for one in state["group"].actors], timeout=30))


def kill_worker(state: State, rank: int, restart: bool = False) -> None:
    """End one actor's process; it may still answer before it hears that it is to end."""
    ray, actor = join_cluster(), state["group"].actors[rank]
    process = Path("/proc", str(ray.get(actor.process.remote(), timeout=30)))
    ray.kill(actor, no_restart=not restart)
    deadline = Deadline(20, what="the worker to be gone")
    while process.exists():
        deadline.sleep(0.02)


def send_when_back(state: State, seed: int, label: str) -> dict[str, Any]:
    """Send as soon as no worker is lost any more; one has to be, first."""
    deadline = Deadline(100, what="the worker to be back")
    lost = 0
    while True:
        try:
            report = send(state, seed, label)
        except PeerLost:
            lost += 1
            deadline.sleep(0.2)
            continue
        assert lost, "nothing was lost"
        return report


def stop(state: State) -> None:
    """End trainer and workers."""
    state["trainer"].shutdown()
    state["group"].stop()
    state["room"].release()


def refused_group(state: State, builder: str) -> None:
    """Start workers whose builder is not there."""
    RayWorkerGroup.start(builder, 1, timeout=100, worker_options={})


def crowd(state: State) -> str:
    """Ask for more room than there is; returns why not, and leaves nothing reserved."""
    try:
        Room(2, resources={"CPU": 3}, strategy="STRICT_PACK", timeout=0.2)
    except WeightwireError as error:
        Room(1, resources={"CPU": 2}, timeout=20).release()
        return f"{type(error).__name__}: {error}"
    return "there was room"
