"""Workers inside vLLM that pull over Ray. Its processes join the cluster; its Ray executor does not run on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from core.tests.distributed_ranks import process_group
from plugins.vllm.tests import sharded_trainer
from plugins.vllm.tests.conftest import TWO_RANKS, Lineup, Models
from plugins.vllm.tests.scene import START_SECONDS, State
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_rank import count_no_leftovers
from weightwire_rdt.cluster import join_cluster
from weightwire_rdt.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * START_SECONDS + 60)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A Ray cluster of one node."""
    with LocalCluster() as started:
        yield started


def join(state: State, variables: dict[str, str]) -> None:
    """Put this rank into the cluster; it stays in it."""
    os.environ.update(variables)
    join_cluster()
    count_no_leftovers()


def test_two_rounds_from_a_sharded_trainer(
    ranks: BorrowRanks, lineup: Lineup, models: Models, cluster: LocalCluster, tmp_path: Path
) -> None:
    server = lineup.get(models.old.folder, *TWO_RANKS, VLLM_CPU_OMP_THREADS_BIND="0|1", **cluster.variables)
    with process_group(ranks, 2, tmp_path) as group:
        group.run(join, cluster.variables)
        port = group.ranks[0].call(sharded_trainer.hold_port)
        group.run(sharded_trainer.shard, models.old.weights)
        group.run(sharded_trainer.open_trainer, server.url, "sharded_rdt", port)
        for number, model in enumerate((models.new, models.old)):
            group.run(sharded_trainer.fill, model.weights)
            report = group.run(sharded_trainer.send, f"pulled-{number}")[0]
            assert server.greedy() == model.greedy()
            assert server.label() == f"pulled-{number}"
            assert report["path"] == "pulled over nixl"
            workers = [rank for rank in report["ranks"] if rank["rank"].startswith("worker")]
            # What the two workers share is the embedding's and the head's rows, and most of the rest.
            assert all(sum(rank["details"]["pulled"].values()) < 0.6 * report["bytes"] for rank in workers)
        group.run(sharded_trainer.close)
    lineup.stop()  # its workers are in a cluster that ends
