"""A control call beside the data plane: the one helper thread a trainer has."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weightwire.deadline import Deadline

GRACE_SECONDS = 0.5
LINGER_SECONDS = 0.3


class ControlCall:
    """Runs `call` in a daemon thread while the caller moves bytes.

    When the call fails, the thread waits a moment for the caller to learn the reason by itself (a refusal reaches it
    through the rendezvous, in the words of the rank that refused) and then cancels `deadline` with the call's error,
    so that whatever the caller is waiting for ends.
    """

    def __init__(self, call: Callable[[], None], deadline: Deadline, *, what: str) -> None:
        self._call = call
        self._deadline = deadline
        self._what = what
        self._condition = threading.Condition()
        self._ended = False
        self._concluded = False
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=f"weightwire-{what}", daemon=True).start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._call()
        except Exception as raised:  # noqa: BLE001  raised again on the caller's thread
            error = raised
        with self._condition:
            self._ended, self._error = True, error
            self._condition.notify_all()
            if error is not None and not self._concluded:
                self._condition.wait_for(lambda: self._concluded, GRACE_SECONDS)
                if not self._concluded:
                    self._deadline.cancel(error)

    def conclude(self) -> None:
        """The caller knows how this step went: an error of the call need not interrupt it any more."""
        with self._condition:
            self._concluded = True
            self._condition.notify_all()

    def linger(self) -> None:
        """Give the call a moment to end, so that the caller finds the workers settled."""
        with self._condition:
            self._condition.wait_for(lambda: self._ended, LINGER_SECONDS)

    def ended(self, deadline: Deadline) -> None:
        """Wait until the call has ended, one way or the other.

        Raises:
            DeadlineExceeded: It has not.
        """
        with self._condition:
            deadline.wait_for(lambda: self._ended, self._condition, self._what)

    def result(self) -> None:
        """Wait until the call has succeeded.

        Raises:
            BaseException: What the deadline was cancelled with meanwhile: a rank's own words by the rendezvous, or
                else what the call raised.
        """
        with self._condition:
            self._deadline.wait_for(lambda: self._ended and self._error is None, self._condition, self._what)
        self.conclude()
