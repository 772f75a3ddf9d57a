"""Weights that workers pull from the layouts that trainers have, between real processes in a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from core.tests.distributed_ranks import process_group
from core.tests.sharded_fleet import details_of, digests, held, sent_by, serve
from core.tests.sharded_models import HIDDEN, Served, flat, hybrid, policy_tensors, served, sharded, two_ways
from plugins.rdt.tests.fleet import Trainers
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank


def check_served(report: dict[str, Any], workers: list[Rank], seed: int) -> None:
    tensors = policy_tensors(seed)
    for index, rank in enumerate(workers):
        expected = Served(index, len(workers))
        expected.load_weights(tensors.items())
        assert rank.call(held) == digests(expected)
    halves = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" not in name)
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name)
    assert sum(sent_by(report, "worker rank")) == halves + len(workers) * norms
    assert sum(sent_by(report, "trainer rank")) == halves + len(workers) * norms


@pytest.mark.parametrize("shard", [flat, hybrid, two_ways])
def test_four_ranks_to_a_tensor_parallel_server(
    ranks: BorrowRanks, tmp_path: Path, shard: Callable[[nn.Module, int], None]
) -> None:
    with process_group(ranks, 4, tmp_path) as group:
        workers = ranks(2)
        client = serve(workers, served)
        trainers = Trainers(group.ranks, client, sharded, shard, buffer_bytes=300, direct_bytes=200).opened()
        for seed in range(1, 4):
            report = trainers.send(seed, f"step-{seed}")
            check_served(report, workers, seed)
            if seed > 1:
                assert [details_of(report, index)["allocated_bytes"] for index in range(2)] == [0, 0]
        assert client.weight_info()["weight_version"] == "step-3"
        assert [details_of(report, 1)["opaque"], details_of(report, 1)["unfilled"]] == [[], {"embed": HIDDEN * 2}]
        assert details_of(report, 0)["way"] == "nixl"
        trainers.close()
