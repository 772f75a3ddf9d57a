"""Waiting for somebody who may have stopped."""

from __future__ import annotations

import time

from weightwire.deadline import Deadline
from weightwire.errors import PeerStalled

WORKER_SECONDS = 2.0
"""How much longer than a trainer rank a worker waits: where another worker does not read, the rank says so first."""
_PAUSE = 0.0005


class Patience:
    """Waits for something to move, and says who did not move when nothing does.

    Args:
        seconds: How long nothing may move.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since = time.monotonic()

    def moved(self) -> None:
        """Something has."""
        self._since = time.monotonic()

    def pause(self, deadline: Deadline, what: str) -> None:
        """Wait a moment.

        Args:
            deadline: Of the round.
            what: Who waits for whom.

        Raises:
            PeerStalled: Nothing has moved for too long.
            DeadlineExceeded: The deadline passed.
            BaseException: What the deadline was cancelled with.
        """
        deadline.check(what)
        if time.monotonic() - self._since > self._seconds:
            raise PeerStalled(f"nothing has moved for {self._seconds:g} s: {what}", transport="sharded_rdt")
        time.sleep(_PAUSE)
