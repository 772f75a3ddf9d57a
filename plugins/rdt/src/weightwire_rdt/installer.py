"""Puts chunks where they belong while the next ones travel."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from weightwire.deadline import Deadline

_IDLE_SECONDS = 30.0


class Installer:
    """One thread that does one thing after the other; it ends by itself when there has been nothing for a while.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str = "weightwire-rdt-install") -> None:
        self._name = name
        self._condition = threading.Condition()
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unfinished = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._dropped = False
        self._then: Callable[[], None] | None = None

    def begin(self) -> None:
        """A round begins: what went wrong in the last one is forgotten."""
        with self._condition:
            self._error, self._dropped = None, False

    def submit(self, work: Callable[[], None]) -> None:
        """Have `work` done; after one that failed nothing is."""
        with self._condition:
            self._unfinished += 1
            self._waiting.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                work = self._waiting.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._condition:
                    if not self._unfinished:
                        self._thread = None
                        return
                continue
            try:
                if self._error is None and not self._dropped:
                    work()
            except BaseException as raised:  # noqa: BLE001 - raised again by `drain`
                self._error = raised
            del work
            then = None
            with self._condition:
                self._unfinished -= 1
                if not self._unfinished:
                    then, self._then = self._then, None
                self._condition.notify_all()
            if then is not None:
                then()

    @property
    def busy(self) -> bool:
        """Whether something is not done."""
        return self._unfinished > 0

    def check(self) -> None:
        """Raise what went wrong, if anything did.

        Raises:
            BaseException: What the first piece of work that failed raised.
        """
        if self._error is not None:
            raise self._error

    def drain(self, deadline: Deadline) -> None:
        """Wait until everything is done.

        Raises:
            BaseException: What the first of them raised.
        """
        with self._condition:
            deadline.wait_for(lambda: not self._unfinished, self._condition, "what arrived to be installed")
        self.check()

    def drop(self) -> None:
        """Do nothing more of what waits, and wait for what is being done."""
        with self._condition:
            self._dropped = True
            self._condition.wait_for(lambda: not self._unfinished)

    def retire(self, then: Callable[[], None]) -> None:
        """Do nothing more of what waits, and call `then` once what is being done is over, without waiting for it."""
        with self._condition:
            self._dropped = True
            if self._unfinished:
                self._then = then
                return
        then()
