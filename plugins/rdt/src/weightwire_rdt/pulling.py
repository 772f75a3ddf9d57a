"""One round of a worker: chunk after chunk from every trainer rank that has one ready, several on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from weightwire.checksums import Checksums
from weightwire.deadline import Deadline
from weightwire.packing import BufferRing, Slot
from weightwire.resharding.incoming import Incoming, Landing, Message
from weightwire_rdt.installer import Installer

_PAUSE = 0.0005


class Arriving(Protocol):
    """A chunk on its way."""

    @property
    def done(self) -> bool:
        """Whether it is here.

        Raises:
            PeerLost: It will not come.
        """

    def abandon(self) -> None:
        """Stop it, as far as that is possible."""


class Inbound(Protocol):
    """A worker's end of a wire."""

    def begin_round(self, number: int) -> None:
        """A round begins."""

    def ready(self, owner: int, ordinal: int) -> bool:
        """Whether that chunk of that trainer rank can be asked for."""

    def receive(self, buffers: Sequence[Tensor], owner: int, ordinal: int) -> Arriving:
        """Have it written into `buffers`."""

    def pause(self, deadline: Deadline, owners: Sequence[int]) -> None:
        """Wait a moment for any of these trainer ranks to have something ready."""

    def close(self) -> None:
        """Let go of everything."""


@dataclass(slots=True)
class _Coming:
    message: Message
    buffers: list[Tensor]
    slot: Slot | None
    arriving: Arriving


class Pulling:
    """One round.

    Args:
        incoming: What is wanted of whom.
        wire: Brings it.
        ring: Buffers for what cannot be received where it belongs.
        landing: Where it belongs.
        installer: Puts it there.
        depth: How many chunks are on their way at a time.
        deadline: Of the round.
        checksums: Notes every chunk under `number(message)`.
        number: What a chunk is called there.
    """

    def __init__(
        self,
        incoming: Incoming,
        wire: Inbound,
        ring: BufferRing,
        landing: Landing,
        installer: Installer,
        *,
        depth: int,
        deadline: Deadline,
        checksums: Checksums,
        number: Callable[[Message], int],
    ) -> None:
        self._wire = wire
        self._ring = ring
        self._landing = landing
        self._installer = installer
        self._depth = depth
        self._deadline = deadline
        self._checksums = checksums
        self._number = number
        self._coming: deque[_Coming] = deque()
        self._wanted: dict[int, deque[Message]] = {}
        self._turn = {id(message): place for place, message in enumerate(incoming.messages)}
        for message in incoming.messages:
            self._wanted.setdefault(message.sender, deque()).append(message)

    def run(self) -> None:
        """Have everything come; the installer may still be busy with the last of it.

        Raises:
            PeerLost: A trainer rank is gone.
            PeerStalled: One has offered nothing for too long.
        """
        try:
            while self._wanted or self._coming:
                self._deadline.check()
                if self._take() or self._ask():
                    continue
                if self._coming:
                    self._deadline.sleep(_PAUSE)
                else:
                    self._wire.pause(self._deadline, sorted(self._wanted))
        except BaseException:
            for coming in self._coming:
                coming.arriving.abandon()
            raise

    def _ask(self) -> bool:
        """Have the earliest chunk come that is ready; returns whether there is one."""
        if len(self._coming) >= self._depth:
            return False
        heads = sorted((self._turn[id(waiting[0])], owner) for owner, waiting in self._wanted.items())
        for _, owner in heads:
            message = self._wanted[owner][0]
            if self._wire.ready(owner, message.ordinal):
                self._start(message)
                self._wanted[owner].popleft()
                if not self._wanted[owner]:
                    del self._wanted[owner]
                return True
        return False

    def _start(self, message: Message) -> None:
        slot, buffers = None, []
        for segment in message.segments:
            if segment.straight and self._landing.device(segment.writes[0]) == self._ring.device:
                buffers.append(self._landing.place(segment.writes[0]))
            else:
                slot = slot or self._ring.acquire(self._deadline)
                buffers.append(slot.buffer[segment.start : segment.stop])
        arriving = self._wire.receive(buffers, message.sender, message.ordinal)
        self._coming.append(_Coming(message, buffers, slot, arriving))

    def _take(self) -> bool:
        """Hand over the oldest chunk if it is here."""
        if not self._coming or not self._coming[0].arriving.done:
            return False
        coming = self._coming.popleft()
        if coming.slot is not None or self._checksums.enabled:
            self._installer.submit(lambda: self._install(coming))
        return True

    def _install(self, coming: _Coming) -> None:
        self._checksums.add(self._number(coming.message), coming.buffers)
        for segment, buffer in zip(coming.message.segments, coming.buffers, strict=True):
            self._landing.install(segment, buffer)
        if coming.slot is not None:
            coming.slot.release()
