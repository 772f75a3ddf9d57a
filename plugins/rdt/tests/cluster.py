"""A Ray cluster for tests, and ranks that are in it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from weightwire.testing.fixtures import BorrowRanks, borrowing
from weightwire.testing.pool import RankPool
from weightwire.testing.pool_process import Rank
from weightwire.testing.pool_rank import count_no_leftovers
from weightwire_rdt.cluster import join_cluster
from weightwire_rdt.nixl_agent import process_agent

HEAD = """
import os, sys
import ray
ray.init(num_cpus=4, object_store_memory=1 << 28, include_dashboard=False, _temp_dir=sys.argv[1], logging_level="error",
         log_to_driver=False, configure_logging=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


class Cluster:
    """A head node, in processes of its own; all of it ends with the context.

    Attributes:
        address: What `ray.init` connects to.
        token: What a process proves that it may, in `RAY_AUTH_TOKEN`.
    """

    def __enter__(self) -> Self:
        # Its sockets have long names, and a path to a socket may not have more than 107 bytes.
        self._directory = tempfile.TemporaryDirectory(prefix="rdt-", dir="/tmp", ignore_cleanup_errors=True)
        self.token = secrets.token_hex(32)
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
        environment["RAY_AUTH_TOKEN"] = self.token
        # Every process that joins would have as many workers started as there are processors, for no task.
        environment |= {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
        environment.pop("RAY_ADDRESS", None)
        self._head = subprocess.Popen(
            [sys.executable, "-c", HEAD, self._directory.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self._head.stdout is not None
        self.address = self._head.stdout.readline().strip()
        assert self.address, "the head node did not start"
        return self

    def joining(self) -> Joining:
        """What puts a process into it."""
        return Joining(self.address, self.token)

    def __exit__(self, *error: object) -> None:
        assert self._head.stdin is not None and self._head.stdout is not None
        self._head.stdin.close()
        self._head.wait(30)
        self._head.stdout.close()
        self._directory.cleanup()


@dataclass(frozen=True)
class Joining:
    """Puts a process into a cluster."""

    address: str
    token: str

    def __call__(self) -> None:
        join({}, self.address, self.token)


def join(state: dict[str, Any], address: str, token: str) -> None:
    """Put this rank into the cluster; it stays in it."""
    if os.environ.get("RAY_ADDRESS") != address:
        os.environ |= {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        join_cluster()
        process_agent()
        count_no_leftovers()


def member_ranks(pool: RankPool, cluster: Cluster, test: str) -> Iterator[BorrowRanks]:
    """The body of the fixture `ranks`."""
    lending = borrowing(pool, test, strict=False)
    lend = next(lending)

    def borrow(count: int) -> list[Rank]:
        lent = lend(count)
        for call in [rank.start(join, cluster.address, cluster.token) for rank in lent]:
            call.result()
        return lent

    yield borrow
    next(lending, None)
