"""Pytest fixtures over one `RankPool` per test session.

The plugin `weightwire_pytest` offers them as `weightwire_pool`, `weightwire_ranks` and `weightwire_strict_ranks`. Under
their short names a conftest.py imports them: `from weightwire.testing.fixtures import pool, ranks, strict_ranks`.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterator

import pytest

from weightwire.testing.pool import Rank, RankPool

BorrowRanks = Callable[[int], list[Rank]]
"""Type of the fixture `ranks`."""


@functools.cache
def _session_pool() -> RankPool:
    # Every conftest.py that imports the fixture makes a session fixture of its own: one pool serves them all.
    pool = RankPool()
    atexit.register(pool.close)
    return pool


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """The pool of the whole session; what tests left in its ranks is printed at the end."""
    yield from session_pool(request.config)


def session_pool(config: pytest.Config) -> Iterator[RankPool]:
    """The body of the fixture `pool`."""
    pool = _session_pool()
    yield pool
    reporter = config.pluginmanager.getplugin("terminalreporter")
    while pool.leaks and reporter is not None:
        reporter.write_line(f"\nleft in a rank, which was replaced: {pool.leaks.pop(0)}", yellow=True)


def borrowing(pool: RankPool, test: str, *, strict: bool) -> Iterator[BorrowRanks]:
    """The body of the fixtures `ranks` and `strict_ranks`."""
    borrowed: list[Rank] = []

    def borrow(count: int) -> list[Rank]:
        more = pool.borrow(count)
        borrowed.extend(more)
        return more

    yield borrow
    pool.give_back(borrowed, after=test, strict=strict)


@pytest.fixture
def ranks(pool: RankPool, request: pytest.FixtureRequest) -> Iterator[BorrowRanks]:
    """`ranks(n)` lends n clean rank processes until the test ends."""
    yield from borrowing(pool, request.node.nodeid, strict=False)


@pytest.fixture
def strict_ranks(pool: RankPool, request: pytest.FixtureRequest) -> Iterator[BorrowRanks]:
    """As `ranks`, and the test fails if it leaves threads, descriptors or running calls in them."""
    yield from borrowing(pool, request.node.nodeid, strict=True)
