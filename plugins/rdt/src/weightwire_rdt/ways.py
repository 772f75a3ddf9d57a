"""How each end of a link tries each way for bytes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from weightwire.collective import TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.fleet import Fleet
from weightwire.rendezvous import Rendezvous
from weightwire_rdt import proofs
from weightwire_rdt.gloo_wire import GlooReading, GlooServing
from weightwire_rdt.meeting import Way
from weightwire_rdt.nixl_agent import NixlAgent, process_agent
from weightwire_rdt.nixl_wire import NixlReading, NixlServing, Peer
from weightwire_rdt.outlet import Outlet
from weightwire_rdt.pulling import Inbound
from weightwire_rdt.ray_carriers import CARRIERS
from weightwire_rdt.ray_wire import RayReading, RayServing

_NIXL_CHUNKS: Final = 2
"""What is read second is offered once the first is known to have been read: then both have heard of each other."""


@dataclass(frozen=True, slots=True)
class End:
    """One rank's end of a link.

    Attributes:
        link: Name of the link.
        rank: The trainer or worker rank.
        peers: The worker or trainer ranks that it gives or takes something.
        fleet: Who is there.
        rendezvous: Of the link.
        producers: By trainer rank, the actors that this end asks.
        device: Where the buffers are.
        stall: Seconds in which nothing moves that are too many.
        piece_bytes: In which large buffers travel where they travel in pieces.
        window: How many pieces are on their way between two ranks.
        parted: Tells which workers the link goes on without.
    """

    link: str
    rank: int
    peers: Sequence[int]
    fleet: Fleet
    rendezvous: Rendezvous
    producers: Mapping[int, Any]
    device: torch.device
    stall: float
    piece_bytes: int
    window: int
    parted: Callable[[], Collection[int]] = tuple

    def trainer(self, rank: int, members: Mapping[int, Any]) -> Peer:
        """A trainer rank, as NIXL knows it."""
        return Peer(trainer_label(rank), members[rank]["name"], self.trainer_box(rank))

    def worker(self, rank: int, members: Mapping[int, Any]) -> Peer:
        """A worker rank, as NIXL knows it."""
        return Peer(worker_label(rank), members[self.fleet.trainers + rank]["name"], self.worker_box(rank))

    def trainer_box(self, rank: int) -> str:
        """Where its notifications go."""
        return f"{self.link}/t{rank}"

    def worker_box(self, rank: int) -> str:
        """Where its notifications go."""
        return f"{self.link}/w{rank}"


def trainer_label(rank: int) -> str:
    """A trainer rank in words."""
    return f"trainer rank {rank}"


def worker_label(rank: int) -> str:
    """A worker rank in words."""
    return f"worker rank {rank}"


def worker_ways(end: End) -> dict[str, Callable[[], Way[Inbound]]]:
    """What makes each way at a worker."""
    ways: dict[str, Callable[[], Way[Inbound]]] = {
        "nixl": lambda: _NixlAtWorker(end),
        "gloo": lambda: _GlooAtWorker(end),
    }
    return ways | {name: partial(_RayAtWorker, end, name) for name in CARRIERS}


def trainer_ways(end: End) -> dict[str, Callable[[], Way[Outlet]]]:
    """What makes each way at a trainer rank."""
    ways: dict[str, Callable[[], Way[Outlet]]] = {
        "nixl": lambda: _NixlAtTrainer(end),
        "gloo": lambda: _GlooAtTrainer(end),
    }
    return ways | {name: partial(_RayAtTrainer, end, name) for name in CARRIERS}


# NIXL


def _introduction(agent: NixlAgent) -> dict[str, Any]:
    return {"name": agent.name, "agent": base64.b64encode(agent.metadata()).decode()}


def _meet(agent: NixlAgent, said: Mapping[str, Any]) -> None:
    agent.meet(said["name"], base64.b64decode(said["agent"]))


class _NixlAtWorker:
    def __init__(self, end: End) -> None:
        self._end = end
        self._agent = process_agent()

    def introduce(self) -> dict[str, Any]:
        # Offers may come as soon as others have heard of this agent.
        self._agent.open_box(self._end.worker_box(self._end.rank))
        return _introduction(self._agent)

    def open(self, members: Mapping[int, Any], deadline: Deadline) -> NixlReading:
        end = self._end
        for owner in end.peers:
            _meet(self._agent, members[owner])
        wire = NixlReading(
            self._agent,
            end.rank,
            {owner: end.trainer(owner, members) for owner in end.peers},
            label=worker_label(end.rank),
            box=end.worker_box(end.rank),
            stall=end.stall,
        )
        proofs.take(wire, end.link, end.rank, end.peers, _NIXL_CHUNKS, deadline)
        return wire


class _NixlAtTrainer:
    def __init__(self, end: End) -> None:
        self._end = end
        self._agent = process_agent()

    def introduce(self) -> dict[str, Any]:
        return _introduction(self._agent)

    def open(self, members: Mapping[int, Any], deadline: Deadline) -> NixlServing:
        end = self._end
        for worker in end.peers:
            _meet(self._agent, members[end.fleet.trainers + worker])
        wire = NixlServing(
            self._agent,
            end.rank,
            {worker: end.worker(worker, members) for worker in end.peers},
            label=trainer_label(end.rank),
            box=end.trainer_box(end.rank),
            stall=end.stall,
            parted=end.parted,
        )
        proofs.give(wire, end.link, end.rank, end.peers, _NIXL_CHUNKS, deadline)
        return wire


# Ray


class _RayAtWorker:
    def __init__(self, end: End, name: str) -> None:
        self._end = end
        self._carrier = CARRIERS[name]()

    def introduce(self) -> dict[str, Any]:
        return {}

    def open(self, members: Mapping[int, Any], deadline: Deadline) -> RayReading:
        end = self._end
        producers = {owner: end.producers[owner] for owner in end.peers}
        wire = RayReading(self._carrier, producers, end.link, end.rank, label=worker_label(end.rank), stall=end.stall)
        proofs.take(wire, end.link, end.rank, end.peers, 1, deadline)
        return wire


class _RayAtTrainer:
    def __init__(self, end: End, name: str) -> None:
        self._end = end
        self._carrier = CARRIERS[name]()

    def introduce(self) -> dict[str, Any]:
        return {}

    def open(self, members: Mapping[int, Any], deadline: Deadline) -> RayServing:
        end = self._end
        workers = {worker: worker_label(worker) for worker in end.peers}
        wire = RayServing(
            self._carrier,
            end.producers[end.rank],
            end.link,
            workers,
            label=trainer_label(end.rank),
            stall=end.stall,
            parted=end.parted,
        )
        proofs.give(wire, end.link, end.rank, end.peers, 1, deadline)
        return wire


# gloo


def _communicator(end: End, members: Mapping[int, Any], rank: int, deadline: Deadline) -> TorchCommunicator | None:
    """The group of all ranks that give or take something; None for one that does neither."""
    if not end.peers:
        return None
    fleet = end.fleet
    routes = [
        (fleet.senders.index(owner), fleet.rank_offset + worker)
        for worker in range(fleet.workers)
        for owner in members[fleet.trainers + worker]["owners"]
    ]
    return TorchCommunicator(
        end.rendezvous.store(f"rdt-{end.link}", deadline),
        rank=rank,
        world_size=fleet.world_size,
        labels=fleet.labels(),
        device=end.device,
        deadline=deadline,
        hostname=end.rendezvous.local_address,
        stall_limit=end.stall,
        piece_bytes=end.piece_bytes,
        window=end.window,
        routes=routes,
    )


class _GlooAtWorker:
    def __init__(self, end: End) -> None:
        self._end = end

    def introduce(self) -> dict[str, Any]:
        return {"owners": list(self._end.peers)}

    def open(self, members: Mapping[int, Any], deadline: Deadline) -> GlooReading:
        end, fleet = self._end, self._end.fleet
        communicator = _communicator(end, members, fleet.rank_offset + end.rank, deadline)
        wire = GlooReading(communicator, {owner: fleet.senders.index(owner) for owner in end.peers})
        proofs.take(wire, end.link, end.rank, end.peers, 1, deadline)
        return wire


class _GlooAtTrainer:
    def __init__(self, end: End) -> None:
        self._end = end

    def introduce(self) -> dict[str, Any]:
        return {}

    def open(self, members: Mapping[int, Any], deadline: Deadline) -> GlooServing:
        end, fleet = self._end, self._end.fleet
        rank = fleet.senders.index(end.rank) if end.peers else -1
        communicator = _communicator(end, members, rank, deadline)
        wire = GlooServing(communicator, {worker: fleet.rank_offset + worker for worker in end.peers})
        proofs.give(wire, end.link, end.rank, end.peers, 1, deadline)
        return wire
