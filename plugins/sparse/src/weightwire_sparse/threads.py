"""The threads of one tracker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class Threads:
    """Some threads, all started when first needed; a forked process, into which threads do not follow, has its own.

    A pool by itself starts a thread only where none is idle, so how many there are would depend on who was quick.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._process = 0
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Have one of them do `work`."""
        if self._pool is None or self._process != os.getpid():
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(self.count, "weightwire-sparse")
            together = threading.Barrier(self.count)
            for _ in range(self.count):
                self._pool.submit(together.wait)
        return self._pool.submit(work)

    def shutdown(self) -> None:
        """Wait for what they do, and end them; a later `submit` starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.shutdown(cancel_futures=True)
