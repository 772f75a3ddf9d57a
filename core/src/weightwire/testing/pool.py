"""A warm pool of rank processes for tests with real processes.

The ranks are forked from a server that has imported torch once: the first costs seconds, each one after it
0.03 s, and a killed rank is replaced at that price. They die with the test process, stopped ones too.

Example:
    def double(state: dict[str, Any], value: int) -> int:
        return 2 * value

    with RankPool() as pool, pool.ranks(2) as (first, second):
        pending = first.start(double, 3)
        second.call(double, 4)
        pending.result()
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from weightwire.testing.pool_call import PendingCall, RankDied
from weightwire.testing.pool_process import Rank
from weightwire.testing.pool_rank import GRACE
from weightwire.testing.pool_wire import Action, FaultError, RemoteError

__all__ = [
    "Action",
    "FaultError",
    "PendingCall",
    "Rank",
    "RankDied",
    "RankPool",
    "RanksLeaked",
    "RemoteError",
    "held_socket",
]

_TIDY_SECONDS = GRACE + 2.0


class RanksLeaked(AssertionError):
    """A test left threads, descriptors or running calls in its ranks."""


class RankPool:
    """Lends ranks to tests and takes them back clean.

    Attributes:
        leaks: What tests left behind, one sentence each. Such a rank is replaced, so tests stay independent.

    Args:
        strict: Raise `RanksLeaked` when ranks come back with something left behind.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.leaks: list[str] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["weightwire.testing.preload"])
        self._idle: list[Rank] = []
        self._lent: list[Rank] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def ranks(self, count: int) -> Iterator[list[Rank]]:
        """`count` clean ranks for the length of a with statement."""
        borrowed = self.borrow(count)
        try:
            yield borrowed
        finally:
            self.give_back(borrowed)

    def borrow(self, count: int, *, fresh: bool = False) -> list[Rank]:
        """`count` clean ranks, `index` 0 to `count - 1`; starts what is missing, or all of them if `fresh`."""
        with self._lock:
            idle = [rank for rank in self._idle if rank.alive]
            taken = 0 if fresh else count
            borrowed, self._idle = idle[:taken], idle[taken:]
            borrowed += [Rank(self._context) for _ in range(count - len(borrowed))]
            self._lent += borrowed
        for index, rank in enumerate(borrowed):
            rank.ready()
            rank.index = index
        return borrowed

    def give_back(self, ranks: Sequence[Rank], *, after: str = "", strict: bool | None = None) -> list[str]:
        """Clear ranks for the next test; one that does not come clean is killed.

        Args:
            ranks: What `borrow` returned. Killed and stopped ones are no leak.
            after: Who had them, for the sentences in `leaks`.
            strict: As for the pool, for this time.

        Returns:
            What was left behind, as added to `leaks`.

        Raises:
            RanksLeaked: Something was, and `strict`.
        """
        found = []
        asked = [(rank, _ask_to_tidy(rank)) for rank in ranks]
        end = time.monotonic() + _TIDY_SECONDS
        for rank, pending in asked:
            left = None if pending is None else _left_behind(pending, end)
            if left != []:
                rank.kill()
            with self._lock:
                self._lent.remove(rank)
                self._idle += [rank] if rank.alive else []
            found += [f"{after + ': ' if after else ''}{rank}: {sentence}" for sentence in left or ()]
        self.leaks += found
        if found and (self.strict if strict is None else strict):
            raise RanksLeaked("; ".join(found))
        return found

    def close(self) -> None:
        """End all ranks, lent ones too."""
        with self._lock:
            ranks = self._idle + self._lent
            self._idle = []
        for rank in ranks:
            rank.kill()


def _ask_to_tidy(rank: Rank) -> PendingCall[list[str]] | None:
    if not rank.alive or rank.stopped:
        return None
    try:
        return rank.tidy()
    except RankDied:
        return None


def _left_behind(pending: PendingCall[list[str]], end: float) -> list[str] | None:
    try:
        return pending.result(max(0.0, end - time.monotonic()))
    except RankDied:
        return None
    except TimeoutError:
        return [f"did not forget its state within {_TIDY_SECONDS:g} s"]


def held_socket() -> socket.socket:
    """A TCP socket bound to a free port of 127.0.0.1, not listening; its port is taken while it is open."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held
