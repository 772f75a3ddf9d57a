"""One round of a worker: chunk after chunk from every trainer rank that has one ready, several on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from weightwire.checksums import Checksums
from weightwire.deadline import Deadline
from weightwire.packing import BufferRing, Slot
from weightwire.resharding.incoming import Incoming, Landing, Message, Segment
from weightwire_rdt.installer import Installer

_PAUSE: Final = 0.0005
_TOGETHER: Final = 64 << 20
"""Bytes up to which chunks that are ready come in one go."""


class Chunk(NamedTuple):
    """A chunk of a trainer rank's, and where its bytes are written, one buffer after the other."""

    ordinal: int
    buffers: list[Tensor]


class Arriving(Protocol):
    """A chunk on its way."""

    @property
    def done(self) -> bool:
        """Whether it is here.

        Raises:
            PeerLost: It will not come.
        """


class Inbound(Protocol):
    """A worker's end of a wire.

    Attributes:
        divides: Whether the buffers of a chunk may be smaller pieces than those that are offered.
    """

    divides: bool

    def begin_round(self, number: int) -> None:
        """A round begins."""

    def ready(self, owner: int, ordinal: int) -> bool:
        """Whether that chunk of that trainer rank can be asked for."""

    def receive(self, chunks: Sequence[Chunk], owner: int, deadline: Deadline) -> Arriving:
        """Have chunks that are `ready` written into their buffers, by the deadline."""

    def pause(self, deadline: Deadline, owners: Sequence[int]) -> None:
        """Wait a moment for any of these trainer ranks to have something ready."""

    def close(self, error: BaseException | None = None) -> None:
        """Let go of everything but the buffers of what is still on its way; `error` is why the link failed, if so."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A chunk, and where it is written."""

    message: Message
    chunk: Chunk
    slot: Slot | None


@dataclass(frozen=True, slots=True)
class _Coming:
    places: list[_Place]
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
        self._here = landing.targets_on(ring.device)
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
        while self._wanted or self._coming:
            self._deadline.check()
            self._installer.check()
            if self._ask() or self._take():
                continue
            if self._coming or self._installer.busy:
                self._deadline.sleep(_PAUSE)
            else:
                self._wire.pause(self._deadline, sorted(self._wanted))

    def _ask(self) -> bool:
        """Have the earliest chunk come that is ready, and what follows it; returns whether there is one."""
        if len(self._coming) >= self._depth:
            return False
        heads = sorted((self._turn[id(waiting[0])], owner) for owner, waiting in self._wanted.items())
        for _, owner in heads:
            if places := self._next_of(owner):
                arriving = self._wire.receive([place.chunk for place in places], owner, self._deadline)
                self._coming.append(_Coming(places, arriving))
                return True
        return False

    def _next_of(self, owner: int) -> list[_Place]:
        """The next chunks of a trainer rank, as far as they are ready and there is room."""
        waiting, places, nbytes = self._wanted[owner], list[_Place](), 0
        while waiting and nbytes < _TOGETHER and self._wire.ready(owner, waiting[0].ordinal):
            slot = None
            if any(self._packed(segment) for segment in waiting[0].segments):
                slot = self._ring.try_acquire()  # what is on its way or being installed gives its own back
                if slot is None:
                    break
            message = waiting.popleft()
            buffers = [self._buffer(segment, slot) for segment in message.segments]
            nbytes += sum(segment.stop - segment.start for segment in message.segments)
            places.append(_Place(message, Chunk(message.ordinal, buffers), slot))
        if not waiting:
            del self._wanted[owner]
        return places

    def _lands(self, segment: Segment) -> bool:
        """Whether it can be received where it belongs."""
        return segment.straight and segment.writes[0].target in self._here

    def _packed(self, segment: Segment) -> bool:
        """Whether it is received into a buffer of the ring."""
        return not self._lands(segment) and segment.stop <= self._ring.length

    def _buffer(self, segment: Segment, slot: Slot | None) -> Tensor:
        if self._lands(segment):
            return self._landing.place(segment.writes[0])
        if segment.stop > self._ring.length:
            return torch.empty(segment.stop - segment.start, dtype=torch.uint8, device=self._ring.device)
        assert slot is not None
        return slot.buffer[segment.start : segment.stop]

    def _take(self) -> bool:
        """Hand over the oldest chunks if they are here."""
        if not self._coming or not self._coming[0].arriving.done:
            return False
        for place in self._coming.popleft().places:
            if place.slot is not None or self._checksums.enabled:
                self._installer.submit(partial(self._install, place))
        return True

    def _install(self, place: _Place) -> None:
        self._checksums.add(self._number(place.message), place.chunk.buffers)
        for segment, buffer in zip(place.message.segments, place.chunk.buffers, strict=True):
            self._landing.install(segment, buffer)
        if place.slot is not None:
            place.slot.release()
