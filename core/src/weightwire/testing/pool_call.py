"""A call that runs in a rank, seen from the test process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from weightwire.testing.pool_wire import Failure, Reply, load

T = TypeVar("T")

CALL_SECONDS = 90.0
"""How long `Rank.call` and `PendingCall.result` wait unless told otherwise, in seconds."""


class RankDied(RuntimeError):
    """The rank's process ended before it answered."""


class PendingCall(Generic[T]):
    """What `Rank.start` returns.

    Attributes:
        ended: `time.monotonic()` when the answer came, None before; for "has raised within 2 s" across ranks.

    Args:
        words: The call and its rank, for messages.
        where: Asks the rank what its threads are doing, for the message of a timeout.
    """

    def __init__(self, words: str, where: Callable[[], str]) -> None:
        self.ended: float | None = None
        self._words = words
        self._where = where
        self._reply: Reply | None = None
        self._died: str | None = None
        self._over = threading.Event()

    def __repr__(self) -> str:
        return f"<PendingCall {self._words}{' (ended)' if self.done() else ''}>"

    def answer(self, reply: Reply) -> None:
        """Take the rank's reply; called by the rank's reader."""
        self._reply = reply
        self._end()

    def bury(self, words: str) -> None:
        """Note that the rank ended without a reply; called by the rank's reader."""
        self._died = words
        self._end()

    def _end(self) -> None:
        self.ended = time.monotonic()
        self._over.set()

    def done(self) -> bool:
        """Whether the call returned, raised, or lost its process."""
        return self._over.is_set()

    def wait(self, timeout: float = CALL_SECONDS) -> None:
        """Wait for the end, whatever it is.

        Raises:
            TimeoutError: It did not end within `timeout` seconds; the message shows the rank's stacks.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self._words} did not end within {timeout:g} s\n{self._where()}")

    def result(self, timeout: float = CALL_SECONDS) -> T:
        """What the function returned.

        Raises:
            BaseException: What the function raised, its type kept; the rank's traceback is its cause.
            RankDied: The process ended first.
            TimeoutError: Neither happened within `timeout` seconds.
        """
        self.wait(timeout)
        if (failure := self._failure()) is not None:
            raise failure
        assert self._reply is not None
        value: T = load(self._reply.value)
        return value

    def exception(self, timeout: float = CALL_SECONDS) -> BaseException | None:
        """What the function raised (or `RankDied`), None if it returned.

        Raises:
            TimeoutError: It did not end within `timeout` seconds.
        """
        self.wait(timeout)
        return self._failure()

    def _failure(self) -> BaseException | None:
        if self._reply is None:
            return RankDied(f"{self._words}: {self._died}")
        failure: Failure | None = self._reply.failure
        return None if failure is None else failure.rebuild(self._words)
