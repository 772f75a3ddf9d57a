"""One call to several servers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from weightwire.clients.protocol import ControlClient

Call = Callable[[ControlClient, int], Any]
"""`call(client, place)`."""


class ParallelCalls:
    """Runs `call` for some of `clients`, each in a daemon thread: one that hangs must not keep the process.

    Args:
        clients: All clients.
        places: Which of them to call.
        call: What to do; has a deadline of its own.
    """

    def __init__(self, clients: Sequence[ControlClient], places: Sequence[int], call: Call) -> None:
        self._results: dict[int, Any] = {}
        self._errors: dict[int, BaseException] = {}
        self._condition = threading.Condition()
        self._places = set(places)
        for at in places:
            arguments = (clients[at], at, call)
            threading.Thread(target=self._run, args=arguments, name=f"weightwire-fanout-{at}", daemon=True).start()

    def _run(self, client: ControlClient, at: int, call: Call) -> None:
        try:
            result, error = call(client, at), None
        except Exception as raised:  # noqa: BLE001 - handed to the caller's thread
            result, error = None, raised
        with self._condition:
            if at not in self._places:
                return
            if error is None:
                self._results[at] = result
            else:
                self._errors[at] = error
            self._condition.notify_all()

    def forget(self, at: int) -> None:
        """How the call to this one ends does not matter any more."""
        with self._condition:
            self._places.discard(at)
            self._results.pop(at, None)
            self._errors.pop(at, None)
            self._condition.notify_all()

    def forgotten(self, at: int, seconds: float) -> bool:
        """Whether `forget` has been called for this one; waits so long for it."""
        with self._condition:
            return self._condition.wait_for(lambda: at not in self._places, seconds)

    def wait(self, seconds: float | None) -> tuple[dict[int, Any], dict[int, BaseException]]:
        """Wait until all have ended, or for so many seconds; without a number, or until one has failed.

        Returns:
            By place the results of those that succeeded, and the errors in order of time.
        """

        def over() -> bool:
            ended = self._places <= self._results.keys() | self._errors.keys()
            return ended or (seconds is None and bool(self._errors))

        with self._condition:
            self._condition.wait_for(over, seconds)
            return dict(self._results), dict(self._errors)
