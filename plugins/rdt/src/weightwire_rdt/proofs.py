"""What each pair of ranks moves before anything else, so that a way that does not move bytes is not chosen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from weightwire.deadline import Deadline
from weightwire.errors import TransferError
from weightwire_rdt.outlet import Outlet
from weightwire_rdt.pulling import Chunk, Inbound

_ROUND: Final = -1


def _proof(link: str, trainer: int, worker: int) -> Tensor:
    digest = hashlib.sha512(f"{link} {trainer} {worker}".encode()).digest()
    return torch.tensor(list(digest), dtype=torch.uint8)


def give(wire: Outlet, link: str, rank: int, workers: Sequence[int], chunks: int, deadline: Deadline) -> None:
    """A trainer rank's part.

    Args:
        wire: Its end.
        link: Name of the link.
        rank: The trainer rank.
        workers: The worker ranks that asked it for something.
        chunks: How often; the next is offered when the one before has been read by all.
        deadline: Of the proof.
    """
    wire.begin_round(_ROUND)
    for _ in range(chunks):
        for worker in workers:
            wire.send([_proof(link, rank, worker)], [worker], deadline=deadline)
        wire.flush(deadline)
    wire.end_round()


def take(wire: Inbound, link: str, worker: int, owners: Sequence[int], chunks: int, deadline: Deadline) -> None:
    """A worker's part; `owners` are the trainer ranks that it asked for something.

    Raises:
        TransferError: Other bytes arrive than were sent.
    """
    wire.begin_round(_ROUND)
    for ordinal in range(chunks):
        for owner in owners:
            while not wire.ready(owner, ordinal):
                wire.pause(deadline, [owner])
            room = torch.zeros_like(_proof(link, owner, worker))
            arriving = wire.receive([Chunk(ordinal, [room])], owner, deadline)
            while not arriving.done:
                wire.pause(deadline, [owner])
            if not torch.equal(room, _proof(link, owner, worker)):
                raise TransferError(f"other bytes arrived from trainer rank {owner} than it sent")
