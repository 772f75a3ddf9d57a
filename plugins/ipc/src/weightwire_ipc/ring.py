"""A ring of reused slots between one sender and its workers, for parameters that are not shared.

What goes through which slot follows from the parameters alone, so both sides work it out. Every worker reads every
slot; a slot is written again once all have. Memory is the slots, whatever the model and however many the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta
from weightwire.packing import ALIGNMENT, Chunk, fill_chunk, plan_chunks
from weightwire.source import as_bytes
from weightwire_ipc.channel import Channel, Signal, wait_any
from weightwire_ipc.copying import copy_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a large parameter in a slot: its row, where the part begins in it, where in the slot, how many bytes."""

    row: int
    start: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fill:
    """What one slot carries.

    Attributes:
        pack: Small parameters, packed.
        pieces: Parts of large ones.
        completes: Rows whose last bytes these are.
        nbytes: Bytes of the slot that are used.
    """

    pack: Chunk | None
    pieces: tuple[Piece, ...]
    completes: tuple[int, ...]
    nbytes: int

    @property
    def last(self) -> int:
        """The last row that it carries bytes of."""
        return self.pack.items[-1].index if self.pack is not None else self.pieces[-1].row


def plan_fills(metas: Sequence[ParamMeta], slot_bytes: int) -> list[Fill]:
    """What goes through the ring, slot by slot: a pure function of the parameters and of the slots' size."""
    fills: list[Fill] = []
    for chunk in plan_chunks(metas, buffer_bytes=slot_bytes):
        if chunk.packed:
            fills.append(Fill(chunk, (), tuple(item.index for item in chunk.items), chunk.nbytes))
        else:
            fills += _cut(chunk, slot_bytes)
    # What is large is cut as one, and may begin before what is packed and end after it.
    return sorted(fills, key=lambda fill: fill.last)


def _cut(chunk: Chunk, slot_bytes: int) -> list[Fill]:
    fills: list[Fill] = []
    pieces: list[Piece] = []
    completes: list[int] = []
    used = 0
    for item in chunk.items:
        done = 0
        while done < item.nbytes or not item.nbytes:
            nbytes = min(item.nbytes - done, slot_bytes - used)
            pieces.append(Piece(item.index, done, used, nbytes))
            done, used = done + nbytes, used + nbytes
            if done == item.nbytes:
                completes.append(item.index)
            if used == slot_bytes:
                fills.append(Fill(None, tuple(pieces), tuple(completes), used))
                pieces, completes, used = [], [], 0
            if not item.nbytes:
                break
    if pieces:
        fills.append(Fill(None, tuple(pieces), tuple(completes), used))
    return fills


def slot_stride(slot_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return -(-slot_bytes // ALIGNMENT) * ALIGNMENT


class Slots:
    """The ring's memory, and whose turn it is.

    Args:
        memory: 1-D uint8 of `count * slot_stride(slot_bytes)` bytes.
        slot_bytes: Size of a slot.
        count: Number of slots.
    """

    def __init__(self, memory: torch.Tensor, slot_bytes: int, count: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._count = count
        self._next = 0

    def next(self) -> torch.Tensor:
        """The slot whose turn it is."""
        start = self._next % self._count * slot_stride(self._slot_bytes)
        self._next += 1
        return self._memory[start : start + self._slot_bytes]

    def settle(self) -> None:
        """Have every write and read that was queued on a device end before anybody is told of it."""
        if self._memory.device.type == "cuda":
            torch.cuda.current_stream(self._memory.device).synchronize()


@dataclass(slots=True)
class Reader:
    """A worker, as the writer of a ring sees it.

    Attributes:
        channel: The connection to it.
        filled: Counts slots that it may read.
        free: Counts slots that it has read.
    """

    channel: Channel
    filled: Signal
    free: Signal


class RingWriter:
    """The sender's end.

    Args:
        slots: The memory.
        count: Number of slots.
        channels: The workers.
    """

    def __init__(self, slots: Slots, count: int, channels: Sequence[Channel]) -> None:
        self._slots = slots
        self.readers = [Reader(channel, Signal(), Signal(count=count)) for channel in channels]

    def write(self, fill: Fill, tensors: Mapping[int, torch.Tensor], deadline: Deadline) -> None:
        """Bring one fill to all workers.

        Args:
            fill: What the slot carries.
            tensors: Contiguous tensors by row.
            deadline: Of the public call.

        Raises:
            PeerLost: A worker is gone.
            DeadlineExceeded: A worker does not read.
        """
        for reader in self.readers:
            while not reader.free.take_soon():
                wait_any([reader.free.fd, reader.channel], deadline, f"{reader.channel.peer} to read")
                _require_alive(reader)
        slot = self._slots.next()
        if fill.pack is not None:
            _pack(slot, fill.pack, tensors)
        for piece in fill.pieces:
            content = as_bytes(tensors[piece.row])[piece.start : piece.start + piece.nbytes]
            copy_bytes(slot[piece.offset : piece.offset + piece.nbytes], content)
        self._slots.settle()
        for reader in self.readers:
            reader.filled.give()

    def close(self) -> None:
        """Close the signals."""
        for reader in self.readers:
            reader.filled.close()
            reader.free.close()


def _pack(slot: torch.Tensor, pack: Chunk, tensors: Mapping[int, torch.Tensor]) -> None:
    if all(tensors[item.index].device == slot.device for item in pack.items):
        fill_chunk(slot, pack, tensors)
        return
    for item in pack.items:
        slot[item.offset : item.offset + item.nbytes].copy_(as_bytes(tensors[item.index]))


def _require_alive(reader: Reader) -> None:
    """A worker says nothing while it reads, so what is there to hear is that it is gone."""
    message = reader.channel.poll()
    if message is not None:
        message.close()
        raise reader.channel.lost()
