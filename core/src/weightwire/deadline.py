"""The time by which one public call must have ended, and a reason to end it sooner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weightwire.errors import DeadlineExceeded

DEFAULT_SECONDS = 300.0
"""Deadline of a public call that names none, in seconds."""

_SLICE = 0.05


class Deadline:
    """Made once at the outermost public call and passed down; no layer makes its own.

    A deadline can also be *cancelled* with an error, from any thread: whoever waits on it raises that error at
    once. This is how an abort, a peer's failure and a lost connection reach a thread that is busy with bytes.

    Args:
        seconds: How long the call may take from now.
        what: What is being waited for, in words for the message of `DeadlineExceeded`.
    """

    def __init__(self, seconds: float = DEFAULT_SECONDS, *, what: str = "the call") -> None:
        self.what = what
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._error: BaseException | None = None
        self._parent: Deadline | None = None
        self._condition = threading.Condition()

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    def part(self, share: float, what: str) -> Deadline:
        """A deadline for a step of this call, `share` of what is left; cancelled when this one is."""
        child = Deadline(self.remaining() * share, what=what)
        child._parent = self
        return child

    def cancel(self, error: BaseException) -> None:
        """Make every present and later `check` and `wait_for` raise `error`; the first error stays."""
        with self._condition:
            if self._error is None:
                self._error = error
            self._condition.notify_all()

    @property
    def cancelled(self) -> BaseException | None:
        """The error this deadline was cancelled with, if it was."""
        if self._error is None and self._parent is not None:
            return self._parent.cancelled
        return self._error

    def check(self, what: str | None = None) -> None:
        """Raise the cancelling error, or `DeadlineExceeded` once the time is over.

        Args:
            what: What is being waited for now, if that is more precise than the deadline's own words.
        """
        if (error := self.cancelled) is not None:
            raise error
        if time.monotonic() >= self._end:
            raise DeadlineExceeded(f"{what or self.what} did not end within {self.seconds:g} s")

    def wait_for(
        self,
        predicate: Callable[[], bool],
        condition: threading.Condition,
        what: str | None = None,
    ) -> None:
        """Wait on `condition` (held by the caller) until `predicate` is true.

        Raises:
            DeadlineExceeded: The time is over.
            BaseException: Whatever the deadline was cancelled with, within 50 ms of the cancellation.
        """
        while not predicate():
            self.check(what)
            condition.wait(min(_SLICE, self.remaining() + 0.001))

    def sleep(self, seconds: float) -> None:
        """Sleep, waking early when cancelled.

        Raises:
            DeadlineExceeded: The deadline came first.
        """
        until = time.monotonic() + seconds
        with self._condition:
            while (left := until - time.monotonic()) > 0:
                self.check()
                self._condition.wait(min(left, self.remaining() + 0.001))
        self.check()
