"""How each end of a link tries each way for bytes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weightwire.deadline import Deadline
from weightwire.errors import TransferError
from weightwire.link import Link
from weightwire_rdt.asking import Wanted, name_of
from weightwire_rdt.meeting import Way
from weightwire_rdt.messages import ShardedRDTWeightTransferInitInfo
from weightwire_rdt.nixl_agent import NixlAgent, process_agent
from weightwire_rdt.nixl_wire import NixlReading, NixlServing, Peer
from weightwire_rdt.pulling import Chunk, Inbound

_PROOF_ROUND = -1


def proof(link: str, trainer: int, worker: int) -> torch.Tensor:
    """Bytes that one pair of ranks moves before anything else, so that what does not move bytes is not chosen."""
    digest = hashlib.sha512(f"{link} {trainer} {worker}".encode()).digest()
    return torch.tensor(list(digest), dtype=torch.uint8)


def _check_proof(arrived: torch.Tensor, link: str, trainer: int, worker: int) -> None:
    if not torch.equal(arrived.cpu(), proof(link, trainer, worker)):
        raise TransferError(f"other bytes arrived from trainer rank {trainer} than it sent")


def worker_ways(
    wanted: Wanted, link: Link, info: ShardedRDTWeightTransferInitInfo
) -> dict[str, Callable[[], Way[Inbound]]]:
    """What makes each way at a worker."""
    owners = sorted({message.sender for message in wanted.incoming.messages})
    end = Ends(name_of(link), link.info.trainers, info.stall_timeout_s)
    return {"nixl": lambda: _NixlAtWorker(end, link.worker, owners)}


class Ends:
    """What names of ranks and boxes both ends derive alike.

    Args:
        link: Name of the link.
        trainers: How many trainer ranks there are.
        stall: Seconds in which nothing moves that are too many.
    """

    def __init__(self, link: str, trainers: int, stall: float) -> None:
        self.link = link
        self.trainers = trainers
        self.stall = stall

    def trainer(self, rank: int, members: Mapping[int, Any]) -> Peer:
        """A trainer rank."""
        return Peer(f"trainer rank {rank}", members[rank]["name"], self.trainer_box(rank))

    def worker(self, rank: int, members: Mapping[int, Any]) -> Peer:
        """A worker rank."""
        return Peer(f"worker rank {rank}", members[self.trainers + rank]["name"], self.worker_box(rank))

    def trainer_box(self, rank: int) -> str:
        """Its box."""
        return f"{self.link}/t{rank}"

    def worker_box(self, rank: int) -> str:
        """Its box."""
        return f"{self.link}/w{rank}"


def _introduction(agent: NixlAgent) -> dict[str, Any]:
    return {"name": agent.name, "agent": base64.b64encode(agent.metadata()).decode()}


def _meet(agent: NixlAgent, said: Mapping[str, Any]) -> None:
    agent.meet(said["name"], base64.b64decode(said["agent"]))


class _NixlAtWorker:
    def __init__(self, end: Ends, worker: int, owners: Sequence[int]) -> None:
        self._end = end
        self._worker = worker
        self._owners = owners
        self._agent = process_agent()

    def introduce(self) -> dict[str, Any]:
        # Offers may come as soon as others have heard of this agent.
        self._agent.open_box(self._end.worker_box(self._worker))
        return _introduction(self._agent)

    def open(self, members: Mapping[int, Any], deadline: Deadline) -> NixlReading:
        end = self._end
        for owner in self._owners:
            _meet(self._agent, members[owner])
        wire = NixlReading(
            self._agent,
            self._worker,
            {owner: end.trainer(owner, members) for owner in self._owners},
            label=f"worker rank {self._worker}",
            box=end.worker_box(self._worker),
            stall=end.stall,
        )
        wire.begin_round(_PROOF_ROUND)
        # What is read second is offered once the first is known to have been read: then both have heard of each other.
        for ordinal in range(2):
            for owner in self._owners:
                self._prove(wire, owner, ordinal, deadline)
        return wire

    def _prove(self, wire: NixlReading, owner: int, ordinal: int, deadline: Deadline) -> None:
        link = self._end.link
        while not wire.ready(owner, ordinal):
            wire.pause(deadline, [owner])
        room = torch.zeros_like(proof(link, owner, self._worker))
        arriving = wire.receive([Chunk(ordinal, [room])], owner)
        while not arriving.done:
            wire.pause(deadline, [owner])
        _check_proof(room, link, owner, self._worker)


class NixlAtTrainer:
    """NIXL as a trainer rank tries it.

    Args:
        end: Names.
        rank: The trainer rank.
        workers: The worker ranks that asked it for something.
    """

    def __init__(self, end: Ends, rank: int, workers: Sequence[int]) -> None:
        self._end = end
        self._rank = rank
        self._workers = workers
        self._agent = process_agent()

    def introduce(self) -> dict[str, Any]:
        """See `Way.introduce`."""
        return _introduction(self._agent)

    def open(self, members: Mapping[int, Any], deadline: Deadline) -> NixlServing:
        """See `Way.open`."""
        end = self._end
        peers = {worker: end.worker(worker, members) for worker in self._workers}
        for worker in self._workers:
            _meet(self._agent, members[end.trainers + worker])
        wire = NixlServing(
            self._agent,
            self._rank,
            peers,
            label=f"trainer rank {self._rank}",
            box=end.trainer_box(self._rank),
            stall=end.stall,
        )
        wire.begin_round(_PROOF_ROUND)
        for _ in range(2):
            for worker in self._workers:
                wire.send([proof(end.link, self._rank, worker)], [worker], deadline=deadline)
            wire.flush(deadline)
        wire.end_round()
        return wire
