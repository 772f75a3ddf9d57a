"""Threads that run a worker's blocking calls, so that the event loop goes on answering.

The loop's own executor is not used: a call that hangs would keep the interpreter alive there, and a user's app may
have filled it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from weightwire.errors import Busy

T = TypeVar("T")

_IDLE_SECONDS = 10.0


class CallThreads:
    """Daemon threads, started as they are needed and ended when they have had nothing to do for 10 s.

    Args:
        name: Prefix of the threads' names.
        limit: How many calls may run at once.
    """

    def __init__(self, name: str, *, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads = 0
        self._running = 0

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run `call` in a thread; the future belongs to the running loop, and cancelling it ends nothing.

        Raises:
            Busy: `limit` calls are running.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                outcome, error = call(), None
            except BaseException as raised:  # noqa: BLE001 - whatever it is, it is raised again in the request
                outcome, error = None, raised
            with self._lock:
                self._running -= 1
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, outcome, error)

        with self._lock:
            if self._running >= self._limit:
                raise Busy(f"{self._limit} {self._name} calls are running already; try again later")
            self._running += 1
            if self._running > self._threads:
                self._threads += 1
                threading.Thread(target=self._work, name=f"weightwire-{self._name}", daemon=True).start()
        self._waiting.put(run)
        return future

    def _work(self) -> None:
        while True:
            try:
                self._waiting.get(timeout=_IDLE_SECONDS)()
            except queue.Empty:
                with self._lock:
                    if self._threads > self._running:
                        self._threads -= 1
                        return


def _settle(future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if future.done():  # its request is gone
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)
