"""Running a function in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

SOON = 0.05
"""Long enough for a thread to reach a wait, for waits that are expected to last; seconds."""


def started(function: Callable[[], Any]) -> Future[Any]:
    """Run `function`."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised again by the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def pending(future: Future[Any]) -> bool:
    """Whether the function is still busy after a while."""
    try:
        future.exception(SOON)
    except TimeoutError:
        return True
    return False
