"""What one worker rank receives, and where it goes: large contiguous pieces straight into their memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from weightwire.checksums import Checksums
from weightwire.collective import Communicator, Handle
from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta
from weightwire.packing import BufferRing, Slot
from weightwire_m2n.moves import Moves, Writes
from weightwire_m2n.planner import Plan
from weightwire_m2n.planning import messages_of
from weightwire_m2n.strided import as_integers, dense, stripped


class Write(NamedTuple):
    """`target.as_strided(sizes, strides, offset).copy_(piece.view(piece_sizes))`, which repeats it in front."""

    target: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    piece_sizes: tuple[int, ...]
    place: int
    nbytes: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes that come from one trainer rank at once.

    Attributes:
        sender: Trainer rank.
        ordinal: Among those of this pair of ranks.
        nbytes: Its size.
        writes: Where the pieces go.
        direct: It is contiguous in the one place that it goes to.
        parameters: Places in the metadata, for messages.
    """

    sender: int
    ordinal: int
    nbytes: int
    writes: tuple[Write, ...]
    direct: bool
    parameters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Incoming:
    """What one worker rank receives.

    Attributes:
        messages: In order.
        nbytes: All together.
    """

    messages: list[Message]
    nbytes: int


def incoming_of(plan: Plan, metadata: Sequence[ParamMeta], rank: int) -> Incoming:
    """What worker rank `rank` receives of these parameters."""
    moves = plan.for_worker(rank)
    assert moves.writes is not None
    writes = _writes(moves, moves.writes, metadata)
    messages = []
    for rows in messages_of(moves):
        mine = tuple(write for row in rows for write in writes[row])
        direct = len(mine) == 1 and dense(mine[0].sizes, mine[0].strides) and mine[0].sizes == mine[0].piece_sizes
        messages.append(
            Message(
                sender=int(moves.sender[rows[0]]),
                ordinal=int(moves.message[rows[0]]),
                nbytes=int(moves.place[rows[-1]] + moves.nbytes[rows[-1]]),
                writes=mine,
                direct=direct and len(rows) == 1,
                parameters=tuple(dict.fromkeys(moves.parameter[rows].tolist())),
            )
        )
    return Incoming(messages, int(moves.nbytes.sum()))


def _writes(moves: Moves, writes: Writes, metadata: Sequence[ParamMeta]) -> list[list[Write]]:
    """The writes of each move."""
    parameter, nbytes, place, sizes = (
        column.tolist() for column in (moves.parameter, moves.nbytes, moves.place, moves.sizes)
    )
    found: list[list[Write]] = [[] for _ in parameter]
    columns = (writes.move, writes.target, writes.offset, writes.strides, writes.repeat_sizes, writes.repeat_strides)
    for row, target, offset, strides, repeat_sizes, repeat_strides in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        own = stripped(sizes[row], strides)
        again = stripped(repeat_sizes, repeat_strides)
        found[row].append(
            Write(
                target,
                offset,
                again[0] + own[0],
                again[1] + own[1],
                own[0],
                place[row],
                nbytes[row],
                metadata[parameter[row]].dtype.itemsize,
            )
        )
    return found


@dataclass(slots=True)
class _Arriving:
    message: Message
    handle: Handle
    buffer: Tensor
    slot: Slot | None = field(default=None)


class Receiving:
    """The messages of one round, in order and several on their way.

    Args:
        incoming: What comes from where.
        communicator: The data plane.
        ring: Buffers of the size of a message.
        memory: By number of the target, a flat tensor.
        sources: Data-plane rank of each sending trainer rank.
        deadline: Of the round.
        checksums: Notes every message under `number(message)`.
        number: What a message is called there.
    """

    def __init__(
        self,
        incoming: Incoming,
        communicator: Communicator,
        ring: BufferRing,
        memory: Mapping[int, Tensor],
        *,
        sources: Mapping[int, int],
        deadline: Deadline,
        checksums: Checksums,
        number: Callable[[Message], int],
    ) -> None:
        self._incoming = incoming
        self._communicator = communicator
        self._ring = ring
        self._memory = memory
        self._sources = sources
        self._deadline = deadline
        self._checksums = checksums
        self._number = number
        self._arriving: deque[_Arriving] = deque()

    def run(self) -> None:
        """Receive everything and put it where it belongs."""
        for message in self._incoming.messages:
            self._post(message)
        while self._arriving:
            self._take()

    def _post(self, message: Message) -> None:
        slot = None
        if message.direct and self._memory[message.writes[0].target].device.type == self._ring.device.type:
            buffer = self._part(message.writes[0]).view(-1).view(torch.uint8)
        else:
            while (slot := self._ring.try_acquire()) is None:
                self._take()
            buffer = slot.buffer[: message.nbytes]
        handle = self._communicator.receive([buffer], self._sources[message.sender], deadline=self._deadline)
        self._arriving.append(_Arriving(message, handle, buffer, slot))
        while self._arriving and self._arriving[0].handle.done:
            self._take()

    def _part(self, write: Write) -> Tensor:
        flat = as_integers(self._memory[write.target], write.itemsize)
        return flat.as_strided(write.sizes, write.strides, flat.storage_offset() + write.offset)

    def _take(self) -> None:
        """Wait for the oldest message and put it where it belongs."""
        arrived = self._arriving.popleft()
        arrived.handle.wait(self._deadline)
        self._checksums.add(self._number(arrived.message), [arrived.buffer])
        if arrived.slot is not None:
            for write in arrived.message.writes:
                piece = arrived.buffer[write.place : write.place + write.nbytes]
                self._part(write).copy_(as_integers(piece, write.itemsize).view(write.piece_sizes))
            arrived.slot.release()
