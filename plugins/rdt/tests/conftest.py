from __future__ import annotations

from collections.abc import Iterator

import pytest

from plugins.rdt.tests.cluster import Cluster, member_ranks
from weightwire.testing.fixtures import BorrowRanks, pool, strict_ranks
from weightwire.testing.pool import RankPool

__all__ = ["pool", "strict_ranks"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs Ray's processes gets the time that they may take to start where others start some too."""
    for item in items:
        needed = getattr(item, "fixturenames", ())
        if "cluster" in needed and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(200))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Ray cluster of one node, for all tests of this process."""
    with Cluster() as started:
        yield started


@pytest.fixture
def ranks(pool: RankPool, cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[BorrowRanks]:
    """As the pool's, of processes that are in the cluster."""
    yield from member_ranks(pool, cluster, request.node.nodeid)
