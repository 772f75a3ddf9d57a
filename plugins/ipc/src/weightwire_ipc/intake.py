"""A worker's half of the link to one sender: the memory it was handed, and one round after the other.

waiting   for the sender to say that the round begins; segments, tables and the ring come in this state
offered   a segment to adopt is being filled
taking    fills of the ring
done      the sender knows that nothing more is needed
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from weightwire import faults
from weightwire.deadline import Deadline
from weightwire.errors import HandshakeError, TransferError
from weightwire.layout import ParamMeta
from weightwire.packing import ALIGNMENT
from weightwire_ipc.channel import Channel, Message, Signal
from weightwire_ipc.device_segment import DeviceMapping
from weightwire_ipc.landing import Landing, Lying
from weightwire_ipc.memory import PAGE, Mapping
from weightwire_ipc.ring import Fill, Slots, plan_fills, slot_stride
from weightwire_ipc.table import RING, Layout, check_table

_LARGEST = 1 << 48
_COMPARED_PAGES = 256


class Intake:
    """What one sender has handed over.

    Args:
        channel: The connection.
        rows: The sender's parameters: place among all, and metadata.
        device: Where the model lives.
    """

    def __init__(self, channel: Channel, rows: Sequence[tuple[int, ParamMeta]], device: torch.device) -> None:
        self.channel = channel
        self._device = device
        self._rows = list(rows)
        self._metas = [meta for _, meta in rows]
        self._segments: dict[int, Mapping | DeviceMapping] = {}
        self._table: torch.Tensor | None = None
        self._lying: Lying | None = None
        self._ring: _Ring | None = None
        self._ring_rows: list[tuple[int, ParamMeta]] = []
        self._fills: list[Fill] = []
        self._left: deque[Fill] = deque()
        self._landing: Landing | None = None
        self._offered: Lying | None = None
        self.number = -1

    @cached_property
    def _layout(self) -> Layout:
        """How the sender lays its parameters out in a segment to adopt."""
        return Layout(self._metas, align=ALIGNMENT)

    # A round

    def expect(self, number: int, landing: Landing) -> None:
        """Begin round `number`."""
        self.number, self._landing, self._offered = number, landing, None
        if self._lying is not None:
            landing.ready(self._lying)

    def waits_for(self) -> list[Channel | int]:
        """What to poll: something is to do once one of these can be read."""
        return [self.channel] if not self._left or self._ring is None else [self.channel, self._ring.filled.fd]

    def advance(self, deadline: Deadline) -> bool:
        """Do what can be done without waiting; returns whether the round is over here.

        Raises:
            PeerLost: The sender is gone.
            HandshakeError, TransferError: It says what does not fit.
        """
        while self._landing is not None:
            message = self.channel.poll()
            if message is not None:
                try:
                    self._hear(message, deadline)
                finally:
                    message.close()
            elif not self._left:
                return False
            if self._left and not self._take(deadline) and message is None:
                return False
        return True

    def _hear(self, message: Message, deadline: Deadline) -> None:
        record = message.record
        if self._left:
            raise TransferError(f"{self.channel.peer} said {record!r} within a round", transport="ipc")
        match record:
            case {"segment": int(number), "memory": int(nbytes)} if number not in self._segments:
                _require_size(nbytes, "a segment")
                (fd,) = self._descriptors(message, 1)
                self._segments[number] = Mapping(fd, nbytes, what=f"segment {number} of {self.channel.peer}")
            case {"segment": int(number), "device": dict(export)} if number not in self._segments:
                self._segments[number] = DeviceMapping(export, self._device, self.channel.credentials.pid)
            case {"drop": int(number)} if number in self._segments:
                del self._segments[number]
                self._lying = self._table = None
            case {"table": int(length)}:
                (fd,) = self._descriptors(message, 1)
                self._learn(fd, length)
            case {"ring": int(slot_bytes), "count": int(count)} if self._ring is None and slot_bytes > 0 and count > 0:
                _require_size(slot_bytes * count, "the ring")
                self._ring = self._open_ring(message, slot_bytes, count)
                self._plan()
            case {"round": int(number)} if number == self.number and self._offered is None:
                self._begin(message, deadline)
            case {"filled": int(number)} if number == self.number and self._offered is not None:
                self._adopt(deadline)
            case _:
                raise TransferError(f"{self.channel.peer} said {record!r}, which does not fit", transport="ipc")

    def _open_ring(self, message: Message, slot_bytes: int, count: int) -> _Ring:
        nbytes, export = count * slot_stride(slot_bytes), message.record.get("device")
        memory: Mapping | DeviceMapping
        *file, filled, free = self._descriptors(message, 2 if isinstance(export, dict) else 3)
        signals = Signal(filled), Signal(free)
        if isinstance(export, dict):
            memory = DeviceMapping(export, self._device, self.channel.credentials.pid)
        else:
            memory = Mapping(file[0], nbytes, what=f"the ring of {self.channel.peer}")
        for signal in signals:
            signal.check(self.channel.peer)
        if memory.nbytes != nbytes:
            raise HandshakeError(f"a ring of {memory.nbytes} bytes came for {nbytes}", transport="ipc")
        return _Ring(Slots(memory.window(), slot_bytes, count), slot_bytes, *signals)

    def _descriptors(self, message: Message, count: int) -> list[int]:
        if len(message.descriptors) != count:
            words = f"{self.channel.peer} sent {len(message.descriptors)} descriptors with {message.record!r}"
            raise HandshakeError(words, transport="ipc")
        taken, message.descriptors = message.descriptors, []
        return taken

    def _learn(self, fd: int, length: int) -> None:
        mapping = Mapping(fd, 16 * len(self._rows), what="the table of parameters")
        if length != len(self._rows):
            raise HandshakeError(f"a table of {length} rows came for {len(self._rows)} parameters", transport="ipc")
        self._table = mapping.window().clone().view(torch.int64).view(length, 2)
        check_table(self._table, self._metas, {number: one.nbytes for number, one in self._segments.items()})
        self._ring_rows = [
            row for row, ring in zip(self._rows, (self._table[:, 0] == RING).tolist(), strict=True) if ring
        ]
        self._lying = None
        self._plan()

    def _plan(self) -> None:
        slot_bytes = self._ring.slot_bytes if self._ring is not None else None
        self._fills = [] if slot_bytes is None else plan_fills([meta for _, meta in self._ring_rows], slot_bytes)

    def _begin(self, message: Message, deadline: Deadline) -> None:
        landing = self._landing
        assert landing is not None
        if "adopt" in message.record:
            self._offered = self._offer_of(message)
        else:
            if self._table is None or (self._ring_rows and self._ring is None):
                words = f"{self.channel.peer} begins a round and has not said where its weights are"
                raise TransferError(words, transport="ipc")
            self._read(landing)
            self._left = deque(self._fills)
            if not self._left:
                self._finish(deadline)

    def _finish(self, deadline: Deadline) -> None:
        self.channel.send({"read": self.number}, deadline=deadline)
        self._landing = None

    # Ways in

    def _read(self, landing: Landing) -> None:
        """Copy what lies in segments."""
        table = self._table
        assert table is not None
        if self._lying is None:
            lies = [(row, *place) for row, place in zip(self._rows, table.tolist(), strict=True) if place[0] != RING]
            windows = {number: self._segments[number].window() for number in {number for _, number, _ in lies}}
            memory = [windows[number] for _, number, _ in lies]
            self._lying = Lying([row for row, _, _ in lies], memory, [offset for _, _, offset in lies])
        if self._lying.rows:
            shown = landing.read(self._lying)
            self._settle()
            if shown:
                # The sink's model has seen this memory itself, and may have written it.
                self._lying = None
                for mapping in self._segments.values():
                    mapping.lent = isinstance(mapping, Mapping)
            faults.reach("ipc.copied")

    def _offer_of(self, message: Message) -> Lying:
        """The segment to adopt, mapped; what is in it is still being written."""
        number = message.record["adopt"]
        mapping = self._segments.get(number) if isinstance(number, int) else None
        (hold,) = self._descriptors(message, 1)
        layout = self._layout
        if not isinstance(mapping, Mapping) or mapping.nbytes != layout.nbytes:
            os.close(hold)
            raise HandshakeError(f"{self.channel.peer} wants what it has not handed over adopted", transport="ipc")
        mapping.lent = True
        sizes = [meta.nbytes for meta in self._metas]
        # A storage for each: a view that is held of one parameter is no concern of the others.
        pieces = mapping.pieces(layout.offsets, sizes, partial(os.close, hold))
        lying = Lying(self._rows, pieces, [0] * len(pieces))
        if self._landing is not None and self._landing.adopts:
            lying.tensors()  # now, while there is time
        return lying

    def _adopt(self, deadline: Deadline) -> None:
        offered, self._offered = self._offered, None
        landing = self._landing
        assert offered is not None and landing is not None
        if landing.adopts:
            landing.adopt(offered)
        else:
            landing.read(offered)
            self._settle()
        faults.reach("ipc.adopted")
        self._finish(deadline)

    def _settle(self) -> None:
        """Have what was queued on a device end before the sender is told that it may go on."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _take(self, deadline: Deadline) -> bool:
        """Take the fills that are there; returns whether any was."""
        ring, landing, took = self._ring, self._landing, False
        assert ring is not None and landing is not None
        while self._left and ring.filled.take_soon():
            deadline.check()
            landing.take(ring.slots.next(), self._left.popleft(), self._ring_rows)
            ring.slots.settle()
            ring.free.give()
            took = True
        if not self._left:
            self._finish(deadline)
        return took

    # Between rounds

    def strays(self) -> list[str]:
        """Parameters that were written here in memory that was adopted and is in use, each reported once.

        Idle memory in which that has happened, or in which nobody can tell, is mapped anew.
        """
        found: list[str] = []
        for mapping in self._segments.values():
            if not isinstance(mapping, Mapping) or not mapping.lent:
                continue
            pages = mapping.strays()
            if mapping.in_use:
                found += self._names_of(mapping, [page for page in pages or [] if page not in mapping.reported])
                mapping.reported.update(pages or [])
            elif pages != []:
                mapping.renew()
                self._lying = None
        return found

    def _names_of(self, mapping: Mapping, pages: Sequence[int]) -> list[str]:
        """The parameters that were written in these pages; beyond a number of them, those that lie there."""
        layout = self._layout
        if len(pages) > _COMPARED_PAGES:
            return layout.names_in(pages, PAGE)
        return layout.names_at([at for page in pages for at in mapping.differences(page)])

    def close(self) -> None:
        """Hang up; what was adopted stays where it is. Idempotent."""
        self.channel.close()
        # What failed is told with its frames, which hold this object for a while; the sender waits for the segment.
        self._landing = self._offered = None
        self._segments.clear()
        self._lying = None
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()


@dataclass(slots=True)
class _Ring:
    """The ring as a worker has it."""

    slots: Slots
    slot_bytes: int
    filled: Signal
    free: Signal

    def close(self) -> None:
        self.filled.close()
        self.free.close()


def _require_size(nbytes: Any, what: str) -> None:
    if not 0 <= nbytes < _LARGEST:
        raise HandshakeError(f"{what} of {nbytes} bytes is refused", transport="ipc")
