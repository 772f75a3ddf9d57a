"""Chunks that Ray carries: a trainer rank lays references ready at its producer, and the worker gets what they name.

trainer rank -> producer   shelve: round, worker, number of the parcel, ordinals of its chunks, references
worker -> producer         take: the parcels from a number on; read: which chunks it has got
producer -> trainer rank   heard: which chunks have been got

A parcel is what a trainer rank has offered to a worker since the last one: an actor's answer takes as long as many MiB.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from weightwire.deadline import Deadline
from weightwire.packing import Pending
from weightwire_rdt.cluster import in_our_words, join_cluster, tell, unwrapped
from weightwire_rdt.installer import Installer
from weightwire_rdt.outlet import Key, Offers, Unneeded
from weightwire_rdt.patience import WORKER_SECONDS, Patience
from weightwire_rdt.pulling import Chunk
from weightwire_rdt.ray_carriers import Carrier

_SLICE: Final = 1.0
_HELD: Final = 4
"""Chunks for one worker that may take room at a time."""
_PARCEL_BYTES: Final = 256 << 20


class _Asking:
    """One question to an actor at a time, asked again when it has been answered."""

    def __init__(self, whom: str) -> None:
        self._whom = whom
        self._asked: Any = None

    def forget(self) -> None:
        """Have the next answer be to a new question."""
        self._asked = None

    def answer(self, method: Any, *arguments: Any) -> dict[str, Any] | None:
        """The answer if it is there; asks if nothing has been asked.

        Raises:
            PeerLost: The actor is gone.
            WeightwireError: What it answered.
        """
        ray = join_cluster()
        try:
            if self._asked is None:
                self._asked = method.remote(*arguments, _SLICE)
            if not ray.wait([self._asked], timeout=0, fetch_local=False)[0]:
                return None
            asked, self._asked = self._asked, None
            answered: dict[str, Any] = unwrapped(ray.get(asked, timeout=_SLICE))
        except ray.exceptions.RayError as error:
            raise in_our_words(error, self._whom) from error
        return answered


@dataclass(slots=True)
class _Parcel:
    """Chunks that have been put and not laid ready."""

    ordinals: list[int] = field(default_factory=list)
    references: list[Any] = field(default_factory=list)
    nbytes: int = 0


class RayServing(Offers):
    """A trainer rank's end.

    Args:
        carrier: How a chunk travels.
        producer: This rank's producer.
        link: Name of the link.
        workers: Every worker that asked for something, in words.
        label: This rank in words.
        stall: Seconds in which nothing moves that are too many.
        parted: Tells which workers the link goes on without.

    Attributes:
        ahead: See `Outlet`.
    """

    ahead = 8

    def __init__(
        self,
        carrier: Carrier,
        producer: Any,
        link: str,
        workers: Mapping[int, str],
        *,
        label: str,
        stall: float,
        parted: Callable[[], Collection[int]] = tuple,
    ) -> None:
        super().__init__(label, workers, stall, parted)
        self._carrier = carrier
        self._producer = producer
        self._link = link
        self._kept: dict[Key, Any] = {}
        self._parcels: dict[int, _Parcel] = {}
        self._numbers = dict.fromkeys(workers, 0)
        self._hearing = _Asking(f"the producer of {label}")

    def begin_round(self, number: int) -> None:
        """A round begins."""
        super().begin_round(number)
        self._carrier.begin_round()
        self._kept.clear()
        self._parcels.clear()
        self._numbers = dict.fromkeys(self._workers, 0)
        self._hearing.forget()

    def end_round(self) -> None:
        """It is over, however it ended."""

    def send(self, buffers: Sequence[Tensor], to: Sequence[int], *, deadline: Deadline) -> Pending:
        """Lay the next chunk ready for the worker in `to`; the buffers may be used again once it is done."""
        (worker,) = to
        if self._has_parted(worker):
            return Unneeded()
        mine = [key for key in self._offered if key[0] == worker]
        if self._carrier.holds and len(mine) >= _HELD:
            self.wait({min(mine)}, deadline)
        ordinal, pending = self._offer(buffers, worker)
        self._kept[worker, ordinal] = reference = self._carrier.put(buffers)
        parcel = self._parcels.setdefault(worker, _Parcel())
        parcel.ordinals.append(ordinal)
        parcel.references.append(reference)
        parcel.nbytes += sum(buffer.numel() for buffer in buffers)
        if self._carrier.holds or parcel.nbytes >= _PARCEL_BYTES:
            self._shelve(worker)
        return pending

    def _shelve(self, worker: int) -> None:
        parcel = self._parcels.pop(worker)
        content = [parcel.ordinals, self._carrier.pack(parcel.references)]
        self._producer.shelve.remote(self._link, self._round, worker, self._numbers[worker], content)
        self._numbers[worker] += 1

    def unread(self) -> set[Key]:
        """See `Offers.unread`; what has been offered is on its way."""
        for worker in list(self._parcels):
            self._shelve(worker)
        return super().unread()

    def wait(self, keys: set[Key], deadline: Deadline) -> None:
        """See `Offers.wait`."""
        self.unread()
        super().wait(keys, deadline)

    def _poll(self) -> bool:
        if not self._offered:
            return False
        answered = self._hearing.answer(self._producer.heard, self._link, self._round)
        moved = False
        for worker, ordinal in answered["read"] if answered is not None else ():
            self._kept.pop((worker, ordinal), None)
            moved |= self._was_read(worker, ordinal)
        return moved

    def close(self, error: BaseException | None = None) -> None:
        """Let go of everything."""
        self._offered.clear()
        self._kept.clear()
        self._carrier.close()


class _Getting:
    """Chunks on their way."""

    def __init__(self, getter: Installer) -> None:
        self._getter = getter
        self.here = threading.Event()

    @property
    def done(self) -> bool:
        self._getter.check()
        return self.here.is_set()


class RayReading:
    """A worker's end. One thread gets chunk after chunk.

    Args:
        carrier: How a chunk travels.
        producers: Of every trainer rank that was asked for something, its producer.
        link: Name of the link.
        worker: This worker rank.
        label: This rank in words.
        stall: Seconds in which nothing moves that are too many.

    Attributes:
        divides: See `Inbound`.
    """

    def __init__(
        self, carrier: Carrier, producers: Mapping[int, Any], link: str, worker: int, *, label: str, stall: float
    ) -> None:
        self.divides = carrier.divides
        self._carrier = carrier
        self._producers = producers
        self._link = link
        self._worker = worker
        self._label = label
        self._stall = stall
        self._round = 0
        self._asking = {owner: _Asking(f"the producer of trainer rank {owner}") for owner in producers}
        self._next = dict.fromkeys(producers, 0)
        self._chunks: dict[tuple[int, int], Any] = {}
        self._patience = Patience(stall + WORKER_SECONDS)
        self._getter = Installer("weightwire-rdt-get")

    def begin_round(self, number: int) -> None:
        """A round begins."""
        self._round = number
        self._carrier.begin_round()
        self._next = dict.fromkeys(self._producers, 0)
        self._chunks.clear()
        for asking in self._asking.values():
            asking.forget()
        self._patience = Patience(self._stall + WORKER_SECONDS)
        self._getter.begin()

    def ready(self, owner: int, ordinal: int) -> bool:
        """Whether a trainer rank has laid a chunk ready."""
        if (owner, ordinal) not in self._chunks:
            self._poll(owner)
        return (owner, ordinal) in self._chunks

    def _poll(self, owner: int) -> None:
        take, first = self._producers[owner].take, self._next[owner]
        answered = self._asking[owner].answer(take, self._link, self._round, self._worker, first)
        for ordinals, packed in answered["parcels"] if answered is not None else ():
            references = self._unpacked(packed, owner)
            self._chunks |= {(owner, ordinal): one for ordinal, one in zip(ordinals, references, strict=True)}
            self._next[owner] += 1

    def _unpacked(self, packed: list[Any], owner: int) -> list[Any]:
        ray = join_cluster()
        try:
            return self._carrier.unpack(packed, self._stall)
        except ray.exceptions.RayError as error:
            raise in_our_words(error, f"trainer rank {owner}") from error

    def receive(self, chunks: Sequence[Chunk], owner: int, deadline: Deadline) -> _Getting:
        """Begin to get chunks that are `ready`."""
        self._patience.moved()
        getting, number = _Getting(self._getter), self._round
        wanted = [(chunk, self._chunks.pop((owner, chunk.ordinal))) for chunk in chunks]

        def get() -> None:
            ray = join_cluster()
            try:
                for chunk, reference in wanted:
                    self._carrier.get(reference, chunk.buffers, min(self._stall, deadline.remaining()))
            except ray.exceptions.RayError as error:
                raise in_our_words(error, f"trainer rank {owner}") from error
            tell(self._producers[owner].read, self._link, number, self._worker, [chunk.ordinal for chunk in chunks])
            getting.here.set()

        self._getter.submit(get)
        return getting

    def pause(self, deadline: Deadline, owners: Sequence[int]) -> None:
        """Wait a moment for any of these trainer ranks to have something ready.

        Raises:
            PeerStalled: They have had nothing for too long.
        """
        names = ", ".join(f"trainer rank {owner}" for owner in owners)
        self._patience.pause(deadline, f"{self._label} waits for {names} to have its next parameters ready")

    def close(self, error: BaseException | None = None) -> None:
        """Let go of everything; what is being got is kept by the thread that gets it."""
        self._chunks.clear()
        self._getter.retire(self._carrier.close)
