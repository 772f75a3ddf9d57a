"""What one trainer rank sends, and how: parameter after parameter, into messages that go when they are complete.

A parameter is let go of when the messages with its pieces have gone, so a source may make its tensors while they are
asked for. At most one message for each worker is open at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from weightwire.checksums import Checksums
from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta
from weightwire.packing import BufferRing, Pending, Slot
from weightwire.resharding.moves import segments
from weightwire.resharding.planner import Plan
from weightwire.resharding.strided import as_integers, dense, stripped
from weightwire.source import as_bytes


class Piece(NamedTuple):
    """Elements of a shard that go to one worker: `shard.as_strided(sizes, strides, offset)`."""

    message: int
    segment: int
    place: int
    nbytes: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dense: bool  # it is contiguous in the shard
    straight: bool  # it goes from its own storage
    last: bool  # of its message


class Message(NamedTuple):
    """Bytes that go to one worker at once: segments, each packed or straight from a shard."""

    worker: int
    ordinal: int  # among those of this pair of ranks
    nbytes: int
    packed: tuple[tuple[int, int] | None, ...]  # of each segment where it is packed, or None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What one trainer rank sends.

    Attributes:
        messages: In order.
        pieces: By parameter.
        nbytes: All together.
    """

    messages: list[Message]
    pieces: dict[int, list[Piece]]
    nbytes: int


def outgoing_of(plan: Plan, metadata: Sequence[ParamMeta], rank: int) -> Outgoing:
    """What trainer rank `rank` sends of these parameters."""
    moves = plan.for_trainer(rank)
    parameter, nbytes, place, offset = (
        column.tolist() for column in (moves.parameter, moves.nbytes, moves.place, moves.offset)
    )
    axes = list(map(stripped, moves.sizes.tolist(), moves.strides.tolist()))
    messages: list[Message] = []
    by_row: dict[int, Piece] = {}
    for rows in map(np.ndarray.tolist, moves.messages()):
        packed: list[tuple[int, int] | None] = []
        for number, part in enumerate(segments([nbytes[row] for row in rows], plan.large)):
            mine = [rows[at] for at in part]
            straight = nbytes[mine[0]] >= plan.large and dense(*axes[mine[0]])
            packed.append(None if straight else (place[mine[0]], place[mine[-1]] + nbytes[mine[-1]]))
            for row in mine:
                by_row[row] = Piece(
                    message=len(messages),
                    segment=number,
                    place=place[row],
                    nbytes=nbytes[row],
                    offset=offset[row],
                    sizes=axes[row][0],
                    strides=axes[row][1],
                    dense=dense(*axes[row]),
                    straight=straight,
                    last=row == rows[-1],
                )
        size = sum(nbytes[row] for row in rows)
        messages.append(Message(int(moves.receiver[rows[0]]), int(moves.message[rows[0]]), size, tuple(packed)))
    pieces: dict[int, list[Piece]] = {}
    for row in sorted(by_row):
        pieces.setdefault(parameter[row], []).append(by_row[row])
    return Outgoing(messages, pieces, sum(nbytes))


def merged(parts: Sequence[Outgoing]) -> Outgoing:
    """What goes to several workers, as one."""
    messages: list[Message] = []
    pieces: dict[int, list[Piece]] = {}
    for part in parts:
        for parameter, mine in part.pieces.items():
            moved = [piece._replace(message=piece.message + len(messages)) for piece in mine]
            pieces.setdefault(parameter, []).extend(moved)
        messages.extend(part.messages)
    return Outgoing(messages, pieces, sum(part.nbytes for part in parts))


class Outbound(Protocol):
    """What messages are given to: a `Communicator`, or whatever has these two methods of one."""

    def send(self, buffers: Sequence[Tensor], to: Sequence[int], *, deadline: Deadline) -> Pending:
        """See `Communicator.send`."""

    def flush(self, deadline: Deadline) -> None:
        """See `Communicator.flush`."""


@dataclass(slots=True)
class _Open:
    """A message that is not complete."""

    slot: Slot | None = None
    straight: dict[int, Tensor] = field(default_factory=dict)


class Sending:
    """One pass over a rank's parameters.

    Args:
        outgoing: What goes where.
        communicator: The data plane.
        ring: Buffers of the size of a message, at least one more than there are workers.
        offset: Data-plane rank of the first worker.
        deadline: Of the round.
        checksums: Notes every message under `number(message)`.
        number: What a message is called there.
        tell: Called with the bytes sent so far whenever a message has gone.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        communicator: Outbound,
        ring: BufferRing,
        *,
        offset: int,
        deadline: Deadline,
        checksums: Checksums,
        number: Callable[[Message], int],
        tell: Callable[[int], None],
    ) -> None:
        self._outgoing = outgoing
        self._communicator = communicator
        self._ring = ring
        self._offset = offset
        self._deadline = deadline
        self._checksums = checksums
        self._number = number
        self._tell = tell
        self._open: dict[int, _Open] = {}
        self.sent = 0

    def send(self, parameter: int, shard: Tensor) -> None:
        """Put the pieces of one parameter on their way.

        Args:
            parameter: Its place in the metadata; they come in order.
            shard: This rank's part of it.
        """
        pieces = self._outgoing.pieces.get(parameter)
        if pieces is None:
            return
        plain, itemsize = shard.detach().contiguous().resolve_conj().resolve_neg(), shard.dtype.itemsize
        content = as_bytes(plain)
        elements = as_integers(content, itemsize)
        base = elements.storage_offset()
        for piece in pieces:
            begun = self._open.get(piece.message)
            if begun is None:
                begun = self._open[piece.message] = _Open()
            if piece.straight:
                start = piece.offset * itemsize
                begun.straight[piece.segment] = content[start : start + piece.nbytes]
            else:
                begun.slot = begun.slot or self._ring.acquire(self._deadline)
                room = begun.slot.buffer[piece.place : piece.place + piece.nbytes]
                if piece.dense:
                    start = piece.offset * itemsize
                    room.copy_(content[start : start + piece.nbytes])
                else:
                    view = elements.as_strided(piece.sizes, piece.strides, base + piece.offset)
                    as_integers(room, itemsize).view(piece.sizes).copy_(view)
            if piece.last:
                self._post(self._outgoing.messages[piece.message], self._open.pop(piece.message))

    def _post(self, message: Message, complete: _Open) -> None:
        slot = complete.slot
        buffers = []
        for segment, packed in enumerate(message.packed):
            if packed is None:
                buffers.append(complete.straight[segment])
            else:
                assert slot is not None
                buffers.append(slot.buffer[packed[0] : packed[1]])
        self._checksums.add(self._number(message), buffers)
        handle = self._communicator.send(buffers, [self._offset + message.worker], deadline=self._deadline)
        if slot is not None:
            slot.release(after=handle)
        self.sent += message.nbytes
        self._tell(self.sent)

    def finish(self) -> None:
        """Wait until everything has gone."""
        assert not self._open, "every message is complete when the source ends"
        self._communicator.flush(self._deadline)


def new_ring(workers: int, num_buffers: int, nbytes: int, device: torch.device) -> BufferRing:
    """Buffers for one open message to each worker, and some on their way."""
    return BufferRing(workers + num_buffers, nbytes, device)
