"""What one worker rank receives, and where it goes: large contiguous pieces straight into their memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weightwire.checksums import Checksums
from weightwire.collective import Communicator, Handle
from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta
from weightwire.packing import BufferRing, Slot
from weightwire.resharding.moves import Moves, Writes, segments
from weightwire.resharding.planner import Plan
from weightwire.resharding.strided import as_integers, dense, stripped
from weightwire.source import as_bytes


class Write(NamedTuple):
    """`target.as_strided(sizes, strides, offset).copy_(piece.view(piece_sizes).flip(flipped))`, which repeats it.

    A piece of a transposed tensor may go backwards along an axis of its target; torch has no negative strides.
    """

    target: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    piece_sizes: tuple[int, ...]
    place: int
    nbytes: int
    itemsize: int
    dense: bool  # it writes contiguous bytes, once
    flipped: tuple[int, ...]  # axes of the piece


class Segment(NamedTuple):
    """Bytes of a message that lie next to each other on the wire."""

    start: int
    stop: int
    writes: tuple[Write, ...]
    straight: bool  # it is received where it belongs
    rows: tuple[int, ...]  # of the plan's moves


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes that come from one trainer rank at once.

    Attributes:
        sender: Trainer rank.
        ordinal: Among those of this pair of ranks.
        segments: In order.
        parameters: Places in the metadata, for messages.
    """

    sender: int
    ordinal: int
    segments: tuple[Segment, ...]
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
    nbytes, place = moves.nbytes.tolist(), moves.place.tolist()
    messages = []
    for rows in map(np.ndarray.tolist, moves.messages()):
        parts = []
        for part in segments([nbytes[row] for row in rows], plan.large):
            mine = [rows[at] for at in part]
            to = tuple(write for row in mine for write in writes[row])
            straight = len(mine) == 1 and nbytes[mine[0]] >= plan.large and len(to) == 1 and to[0].dense
            parts.append(Segment(place[mine[0]], place[mine[-1]] + nbytes[mine[-1]], to, straight, tuple(mine)))
        parameters = tuple(dict.fromkeys(moves.parameter[rows].tolist()))
        messages.append(Message(int(moves.sender[rows[0]]), int(moves.message[rows[0]]), tuple(parts), parameters))
    return Incoming(messages, sum(nbytes))


def separated(incoming: Incoming) -> Incoming:
    """The same with every piece that is contiguous where it goes as a segment of its own, which is straight.

    For a receiver that takes bytes from where they lie together to many places at once.
    """
    messages = [
        replace(message, segments=tuple(part for segment in message.segments for part in _parts(segment)))
        for message in incoming.messages
    ]
    return Incoming(messages, incoming.nbytes)


def _parts(segment: Segment) -> Iterator[Segment]:
    if segment.straight:
        yield segment
        return
    # Pieces lie next to each other; each is written at least once, and those of one begin at the same byte.
    pieces = [tuple(writes) for _, writes in groupby(segment.writes, lambda write: write.place)]
    for straight, run in groupby(range(len(pieces)), lambda at: len(pieces[at]) == 1 and pieces[at][0].dense):
        places = list(run)
        for part in [[at] for at in places] if straight else [places]:
            first, last = pieces[part[0]][0], pieces[part[-1]][0]
            writes = tuple(write for at in part for write in pieces[at])
            rows = tuple(segment.rows[at] for at in part)
            yield Segment(first.place, last.place + last.nbytes, writes, straight, rows)


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
        backwards = sum((size - 1) * stride for size, stride in zip(sizes[row], strides, strict=True) if stride < 0)
        sized, signed = stripped(sizes[row], strides)
        own = sized, tuple(map(abs, signed))
        again = stripped(repeat_sizes, repeat_strides)
        found[row].append(
            Write(
                target,
                offset + backwards,
                again[0] + own[0],
                again[1] + own[1],
                own[0],
                place[row],
                nbytes[row],
                metadata[parameter[row]].dtype.itemsize,
                not again[0] and dense(sized, signed),
                tuple(axis for axis, stride in enumerate(signed) if stride < 0),
            )
        )
    return found


class Landing:
    """Where what arrives belongs.

    Args:
        memory: By number of the target, a flat tensor.
    """

    def __init__(self, memory: Mapping[int, Tensor]) -> None:
        self._bytes = {target: as_bytes(flat) for target, flat in memory.items()}

    def device(self, write: Write) -> torch.device:
        """Where a write goes."""
        return self._bytes[write.target].device

    def targets_on(self, device: torch.device) -> frozenset[int]:
        """The targets whose memory is there."""
        return frozenset(target for target, flat in self._bytes.items() if flat.device == device)

    def place(self, write: Write) -> Tensor:
        """Where a dense write goes, as bytes."""
        start = write.offset * write.itemsize
        return self._bytes[write.target][start : start + write.nbytes]

    def install(self, segment: Segment, buffer: Tensor) -> None:
        """Put a segment where it belongs, unless it arrived there."""
        if segment.straight and buffer.data_ptr() == self.place(segment.writes[0]).data_ptr():
            return
        for write in segment.writes:
            start = write.place - segment.start
            self._write(write, buffer[start : start + write.nbytes])

    def _write(self, write: Write, piece: Tensor) -> None:
        if write.dense:
            self.place(write).copy_(piece)
            return
        flat = as_integers(self._bytes[write.target], write.itemsize)
        part = flat.as_strided(write.sizes, write.strides, flat.storage_offset() + write.offset)
        plain = as_integers(piece, write.itemsize).view(write.piece_sizes)
        part.copy_(plain.flip(write.flipped) if write.flipped else plain)


@dataclass(slots=True)
class _Arriving:
    message: Message
    handle: Handle
    buffers: list[Tensor]
    slot: Slot | None


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
        self._landing = Landing(memory)
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
        slot, buffers = None, []
        for segment in message.segments:
            if segment.straight and self._landing.device(segment.writes[0]).type == self._ring.device.type:
                buffers.append(self._landing.place(segment.writes[0]))
            elif segment.stop > self._ring.length:
                buffers.append(torch.empty(segment.stop - segment.start, dtype=torch.uint8, device=self._ring.device))
            else:
                while slot is None and (slot := self._ring.try_acquire()) is None:
                    self._take()
                buffers.append(slot.buffer[segment.start : segment.stop])
        handle = self._communicator.receive(buffers, self._sources[message.sender], deadline=self._deadline)
        self._arriving.append(_Arriving(message, handle, buffers, slot))
        while self._arriving and self._arriving[0].handle.done:
            self._take()

    def _take(self) -> None:
        """Wait for the oldest message and put it where it belongs."""
        arrived = self._arriving.popleft()
        arrived.handle.wait(self._deadline)
        self._checksums.add(self._number(arrived.message), arrived.buffers)
        for segment, buffer in zip(arrived.message.segments, arrived.buffers, strict=True):
            self._landing.install(segment, buffer)
        if arrived.slot is not None:
            arrived.slot.release()
