"""A sender's half of one link: what it has handed to its workers, and what it tells them in a round.

To each worker, in this order where there is something to say:

    segment  a segment of memory, under a number
    drop     a segment is not needed any more
    table    where every parameter of this sender lies
    ring     the ring, its slots, and the two signals of this worker
    round    round n: read what the table says, then take the fills of the ring; or adopt a segment
    filled   that segment has its weights

Each worker answers `read` with the round's number once it needs nothing more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from weightwire.deadline import Deadline
from weightwire.errors import TransferError
from weightwire_ipc.channel import Channel, wait_any
from weightwire_ipc.device_segment import DeviceSegment
from weightwire_ipc.memory import MemoryFile
from weightwire_ipc.ring import RingWriter, Slots, slot_stride
from weightwire_ipc.table import RING


class Segment(Protocol):
    """Memory that can be handed to a worker."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def hand_over(self, pid: int) -> tuple[dict[str, Any], list[int]]:
        """What to tell the worker of process `pid` of it, and descriptors to go with that."""


class Feed:
    """Everything that one sender says to the workers of one link.

    Args:
        channels: The workers, by member rank.
        slot_bytes: Size of a ring slot.
        count: Number of ring slots.
        device: Where the ring is.
    """

    def __init__(self, channels: Mapping[int, Channel], *, slot_bytes: int, count: int, device: torch.device) -> None:
        self._channels = list(channels.values())
        self._slot_bytes = slot_bytes
        self._count = count
        self._device = device
        self._numbers: dict[Segment, int] = {}
        self._given = 0
        self._told: torch.Tensor | None = None
        self._ring: tuple[RingWriter, MemoryFile | DeviceSegment] | None = None

    def give(self, segment: Segment, deadline: Deadline) -> int:
        """Hand a segment to every worker, unless they have it; returns its number."""
        number = self._numbers.get(segment)
        if number is None:
            number = self._numbers[segment] = self._given
            self._given += 1
            for channel in self._channels:
                record, descriptors = segment.hand_over(channel.credentials.pid)
                channel.send({"segment": number, **record}, descriptors, deadline=deadline)
        return number

    def keep(self, segments: Iterable[Segment], deadline: Deadline) -> None:
        """Have the workers let go of all segments but these."""
        kept = set(segments)
        for segment in [one for one in self._numbers if one not in kept]:
            self._tell({"drop": self._numbers.pop(segment)}, deadline)
            if isinstance(segment, DeviceSegment):
                segment.close()

    def tell_table(self, table: torch.Tensor, segments: Sequence[Segment], deadline: Deadline) -> None:
        """Say where every parameter lies, unless that is what was said last; hands the segments over first.

        Args:
            table: int64 of shape [n, 2]; its first column are places in `segments`.
            segments: What the table is about.
            deadline: Of the public call.
        """
        if self._told is table:
            return
        self.keep(segments, deadline)
        numbers = torch.tensor([*(self.give(one, deadline) for one in segments), RING], dtype=torch.int64)
        rows = torch.stack([numbers[table[:, 0]], table[:, 1]], dim=1)
        file = MemoryFile(rows.nbytes, what="the table of parameters")
        file.memory.copy_(rows.reshape(-1).view(torch.uint8))
        self._tell({"table": len(table)}, deadline, [file.fd])
        file.close()
        self._told = table

    def ring(self, deadline: Deadline) -> RingWriter:
        """The ring, made and handed over when it is first needed."""
        if self._ring is None:
            nbytes = self._count * slot_stride(self._slot_bytes)
            segment, memory = self._allocate(nbytes)
            writer = RingWriter(Slots(memory, self._slot_bytes, self._count), self._count, self._channels)
            self._ring = writer, segment
            for reader in writer.readers:
                record, descriptors = segment.hand_over(reader.channel.credentials.pid)
                ring = {"ring": self._slot_bytes, "count": self._count, **record}
                signals = [reader.filled.fd, reader.free.fd]
                reader.channel.send(ring, [*descriptors, *signals], deadline=deadline)
        return self._ring[0]

    def _allocate(self, nbytes: int) -> tuple[MemoryFile | DeviceSegment, torch.Tensor]:
        if self._device.type == "cpu":
            file = MemoryFile(nbytes, what="the ring")
            return file, file.memory
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return DeviceSegment(memory.untyped_storage()), memory

    def begin(self, number: int, deadline: Deadline, *, adopt: int | None = None, hold: int | None = None) -> None:
        """Have the workers read, or make ready to adopt the segment of that number; takes `hold` over."""
        try:
            record = {"round": number} if adopt is None else {"round": number, "adopt": adopt}
            self._tell(record, deadline, [] if hold is None else [hold])
        finally:
            if hold is not None:
                os.close(hold)

    def tell_filled(self, number: int, deadline: Deadline) -> None:
        """Say that the segment to adopt has the weights of round `number`."""
        self._tell({"filled": number}, deadline)

    def finish(self, number: int, deadline: Deadline) -> None:
        """Wait until every worker has read everything.

        Raises:
            PeerLost: One is gone.
            DeadlineExceeded: One does not.
        """
        reading = list(self._channels)
        while reading:
            for channel in list(reading):
                if (message := channel.poll()) is not None:
                    message.close()
                    if message.record != {"read": number}:
                        raise TransferError(f"{channel.peer} answered {message.record!r}", transport="ipc")
                    reading.remove(channel)
            if reading:
                wait_any(reading, deadline, f"{reading[0].peer} to have read")

    def _tell(self, record: dict[str, Any], deadline: Deadline, descriptors: list[int] | None = None) -> None:
        for channel in self._channels:
            channel.send(record, descriptors or [], deadline=deadline)

    def close(self) -> None:
        """Hang up; idempotent."""
        for channel in self._channels:
            channel.close()
        ring, self._ring = self._ring, None
        if ring is not None:
            ring[0].close()
            ring[1].close()
        for segment in self._numbers:
            if isinstance(segment, DeviceSegment):
                segment.close()
        self._numbers.clear()
