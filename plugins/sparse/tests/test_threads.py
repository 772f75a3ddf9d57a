"""The threads of a tracker."""

import threading

import pytest

from weightwire_sparse.threads import Threads


def _running() -> int:
    return sum(thread.name.startswith("weightwire-sparse") for thread in threading.enumerate())


@pytest.mark.timeout(30)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_are_started_at_once_and_none_is_left(count: int) -> None:
    before = _running()
    threads = Threads(count)
    assert threads.submit(lambda: 1).result() == 1
    assert _running() == before + count
    for _ in range(20):
        threads.submit(lambda: 1).result()
    assert _running() == before + count
    threads.shutdown()
    assert _running() == before
    assert threads.submit(lambda: 2).result() == 2
    threads.shutdown()
