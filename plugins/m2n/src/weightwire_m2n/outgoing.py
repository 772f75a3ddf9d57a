"""What one trainer rank sends, and how: parameter after parameter, into messages that go when they are full.

A parameter is let go of as soon as its pieces are on their way, so a source may make its tensors while they are asked
for. At most one message for each worker is open at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weightwire.checksums import Checksums
from weightwire.collective import Communicator
from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta
from weightwire.packing import BufferRing, Slot
from weightwire.source import as_bytes
from weightwire_m2n.planner import Plan
from weightwire_m2n.planning import messages_of
from weightwire_m2n.strided import as_integers, dense, stripped


class Piece(NamedTuple):
    """Elements of a shard that go to one worker: `shard.as_strided(sizes, strides, offset)`."""

    message: int
    place: int
    nbytes: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    last: bool  # of its message


class Message(NamedTuple):
    """Bytes that go to one worker at once."""

    worker: int
    ordinal: int  # among those of this pair of ranks
    nbytes: int
    direct: bool  # one piece that is contiguous in its shard


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
    for rows in messages_of(moves):
        size, alone = place[rows[-1]] + nbytes[rows[-1]], len(rows) == 1
        for row in rows:
            piece = Piece(len(messages), place[row], nbytes[row], offset[row], *axes[row], row == rows[-1])
            by_row[row] = piece
        first = rows[0]
        direct = alone and dense(*axes[first])
        messages.append(Message(int(moves.receiver[first]), int(moves.message[first]), size, direct))
    pieces: dict[int, list[Piece]] = {}
    for row in sorted(by_row):
        pieces.setdefault(parameter[row], []).append(by_row[row])
    return Outgoing(messages, pieces, sum(nbytes))


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
        communicator: Communicator,
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
        self._open: dict[int, Slot] = {}
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
        plain = shard.detach().contiguous().resolve_conj().resolve_neg()
        flat = as_integers(as_bytes(plain), shard.dtype.itemsize)
        for piece in pieces:
            message = self._outgoing.messages[piece.message]
            view = flat.as_strided(piece.sizes, piece.strides, flat.storage_offset() + piece.offset)
            if message.direct:
                self._post(message, as_bytes(view), None)
                continue
            slot = self._open.get(piece.message) or self._opened(piece.message)
            room = slot.buffer[piece.place : piece.place + piece.nbytes]
            as_integers(room, shard.dtype.itemsize).view(piece.sizes).copy_(view)
            if piece.last:
                self._post(message, slot.buffer[: message.nbytes], self._open.pop(piece.message))

    def _opened(self, message: int) -> Slot:
        slot = self._open[message] = self._ring.acquire(self._deadline)
        return slot

    def _post(self, message: Message, buffer: Tensor, slot: Slot | None) -> None:
        self._checksums.add(self._number(message), [buffer])
        handle = self._communicator.send([buffer], [self._offset + message.worker], deadline=self._deadline)
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
