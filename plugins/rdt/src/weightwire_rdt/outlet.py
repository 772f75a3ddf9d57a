"""What a trainer rank's end of a wire is, whatever the bytes travel over."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

from torch import Tensor

from weightwire import faults
from weightwire.deadline import Deadline
from weightwire.packing import Pending
from weightwire_rdt.patience import Patience

PARTING_SECONDS: Final = 0.5
"""How long after its end became plain here the rendezvous may take to say that a worker has parted."""
_PAUSE: Final = 0.002

Key = tuple[int, int]
"""Of a chunk: its worker rank, and its ordinal among those of the round that go there."""


class Outlet(Protocol):
    """A trainer rank's end of a wire.

    Attributes:
        ahead: How many times as many buffers as are on their way at a time it takes to keep a worker busy: more than
            one where hearing that a chunk was read takes long.
        goes_on: Whether the others are served when some workers have parted.
    """

    ahead: int
    goes_on: bool

    def begin_round(self, number: int) -> None:
        """A round begins."""

    def end_round(self) -> None:
        """It is over, however it ended."""

    def send(self, buffers: Sequence[Tensor], to: Sequence[int], *, deadline: Deadline) -> Pending:
        """Offer the next chunk to the worker in `to`; the buffers may be used again once it is done."""

    def unread(self) -> set[Key]:
        """The chunks that have been offered and not read."""

    def wait(self, keys: set[Key], deadline: Deadline) -> None:
        """Wait until these have been read."""

    def flush(self, deadline: Deadline) -> None:
        """Wait until everything has been read."""

    def close(self, error: BaseException | None = None) -> None:
        """Let go of everything; `error` is why the link is over, if it failed."""


class Unneeded:
    """A chunk for a worker that has parted."""

    done = True

    def wait(self, deadline: Deadline) -> None:
        """Nobody will read it."""


class _Offered:
    """A chunk that a worker has not read yet."""

    def __init__(self, offers: Offers, key: Key) -> None:
        self._offers = offers
        self._key = key

    @property
    def done(self) -> bool:
        return self._offers.was_read(self._key)

    def wait(self, deadline: Deadline) -> None:
        self._offers.wait({self._key}, deadline)


class Offers(ABC):
    """The part of an `Outlet` that knows what has been offered and not read.

    Args:
        label: This rank in words.
        workers: Every worker that asked for something, in words.
        stall: Seconds in which nothing moves that are too many.
        parted: Tells which workers the link goes on without.

    Attributes:
        goes_on: See `Outlet`.
    """

    goes_on = True

    def __init__(
        self, label: str, workers: Mapping[int, str], stall: float, parted: Callable[[], Collection[int]]
    ) -> None:
        self._label = label
        self._workers = workers
        self._stall = stall
        self._parted = parted
        self._round = 0
        self._next = dict.fromkeys(workers, 0)
        self._offered: dict[Key, Sequence[Tensor]] = {}

    def begin_round(self, number: int) -> None:
        """A round begins."""
        self._round = number
        self._next = dict.fromkeys(self._workers, 0)
        self._offered.clear()

    def _offer(self, buffers: Sequence[Tensor], worker: int) -> tuple[int, Pending]:
        """Note the next chunk for a worker; returns its ordinal, and what tells when it has been read."""
        ordinal = self._next[worker]
        self._next[worker] += 1
        self._offered[worker, ordinal] = buffers
        return ordinal, _Offered(self, (worker, ordinal))

    def _was_read(self, worker: int, ordinal: int) -> bool:
        """Note that a chunk of this round was read; returns whether that is news."""
        if self._offered.pop((worker, ordinal), None) is None:
            return False
        if ordinal == 0:
            faults.reach("communicator.first_piece")
        return True

    def _has_parted(self, worker: int, seconds: float = 0.0) -> bool:
        """Whether nobody waits for this worker any more; gives whoever notices its end so long to say so."""
        until = time.monotonic() + seconds
        while worker not in self._parted():
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE)
        return True

    def _look(self) -> bool:
        """See who has read what, or has parted; returns whether there was any news."""
        parted = self._parted()
        let_go = [key for key in self._offered if key[0] in parted] if parted else []
        for key in let_go:
            del self._offered[key]
        return self._poll() or bool(let_go)

    @abstractmethod
    def _poll(self) -> bool:
        """Hear what has been read; returns whether anything was."""

    def was_read(self, key: Key) -> bool:
        """Whether a chunk has been read, or never will be."""
        self._look()
        return key not in self._offered

    def unread(self) -> set[Key]:
        """The chunks that have been offered and not read."""
        self._look()
        return set(self._offered)

    def wait(self, keys: set[Key], deadline: Deadline) -> None:
        """Wait until these chunks have been read.

        Raises:
            PeerStalled: Workers do not read; they are named.
            DeadlineExceeded: The deadline passed.
        """
        patience = Patience(self._stall)
        while left := keys & self._offered.keys():
            if self._look():
                patience.moved()
                continue
            names = ", ".join(sorted({self._workers[worker] for worker, _ in left}))
            patience.pause(deadline, f"{self._label} waits for {names} to read")

    def flush(self, deadline: Deadline) -> None:
        """Wait until everything has been read."""
        self.wait(set(self._offered), deadline)
