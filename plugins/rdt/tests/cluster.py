"""Ranks that are in a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weightwire.testing.fixtures import BorrowRanks, borrowing
from weightwire.testing.pool import RankPool
from weightwire.testing.pool_process import Rank
from weightwire.testing.pool_rank import count_no_leftovers
from weightwire_rdt.cluster import join_cluster
from weightwire_rdt.local_cluster import LocalCluster
from weightwire_rdt.nixl_agent import process_agent


@dataclass(frozen=True)
class Joining:
    """Puts a process into a cluster."""

    variables: tuple[tuple[str, str], ...]

    def __call__(self) -> None:
        join({}, dict(self.variables))


class Cluster(LocalCluster):
    """The cluster of a test session."""

    def joining(self) -> Joining:
        """What puts a process into it."""
        return Joining(tuple(self.variables.items()))


def join(state: dict[str, Any], variables: dict[str, str]) -> None:
    """Put this rank into the cluster; it stays in it."""
    if os.environ.get("RAY_ADDRESS") != variables["RAY_ADDRESS"]:
        os.environ.update(variables)
        join_cluster()
        process_agent()
        count_no_leftovers()


def member_ranks(pool: RankPool, cluster: Cluster, test: str) -> Iterator[BorrowRanks]:
    """The body of the fixture `ranks`."""
    lending = borrowing(pool, test, strict=False)
    lend = next(lending)

    def borrow(count: int) -> list[Rank]:
        lent = lend(count)
        for call in [rank.start(join, cluster.variables) for rank in lent]:
            call.result()
        return lent

    yield borrow
    next(lending, None)
