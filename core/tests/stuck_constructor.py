"""A constructor of gloo that waits for a peer: `python stuck_constructor.py` gives one up and ends meanwhile."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import HashStore, Store

from weightwire import reaper

EXIT_CODE = 7
GLOO_SECONDS = 1.0
"""gloo gives up after several times of this."""
WATCHED_SECONDS = 0.3

_c10d: Any = distributed


class NoMore(Exception):
    """Raised by whoever watches."""


class Absent(Store):
    """The store of a peer that says where it is and does not come."""

    def __init__(self, store: Any, gone: threading.Event) -> None:
        super().__init__()
        self._store = store
        self._gone = gone

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(0)) -> None:
        self._gone.wait(60)
        raise RuntimeError("went away")


def make(store: Any, rank: int) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=GLOO_SECONDS)
    return _c10d.ProcessGroupGloo(store, rank, 2, options)


def give_up() -> float:
    """Construct rank 1 of a group whose rank 0 never comes, and give it up; returns how many seconds that took.

    Chance says which of the two calls the other, and only the one that is called has to wait.
    """
    while (seconds := _give_up()) is None:
        pass
    return seconds


def _give_up() -> float | None:
    store, gone = HashStore(), threading.Event()

    def be_absent() -> None:
        with contextlib.suppress(RuntimeError):
            make(Absent(store, gone), 0)

    peer = threading.Thread(target=be_absent)
    peer.start()
    began = time.monotonic()

    def watch() -> None:
        if time.monotonic() - began > WATCHED_SECONDS:
            raise NoMore

    try:
        reaper.destroy([reaper.construct(lambda: make(store, 1), watch=watch)])
        return None
    except NoMore:
        return time.monotonic() - began
    finally:
        gone.set()
        peer.join()


if __name__ == "__main__":
    assert give_up() < 10 * WATCHED_SECONDS
    assert any(thread.name == "weightwire-construct" for thread in threading.enumerate())
    sys.exit(EXIT_CODE)
