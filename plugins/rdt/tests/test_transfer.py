"""Weights that workers pull from the layouts that trainers have, between real processes in a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from core.tests.distributed_ranks import process_group
from core.tests.sharded_fleet import details_of, serve
from core.tests.sharded_models import (
    HIDDEN,
    check_served,
    flat,
    hybrid,
    served,
    sharded,
    two_ways,
)
from plugins.rdt.tests.fleet import Trainers
from weightwire.testing.fixtures import BorrowRanks


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
        assert [rank["details"] for rank in report["ranks"][:4]] == [{"gathered_bytes": 0}] * 4
        trainers.close()


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["ray_nixl", "gloo", "object_store"])
def test_other_ways_for_the_bytes(ranks: BorrowRanks, tmp_path: Path, way: str) -> None:
    with process_group(ranks, 4, tmp_path) as group:
        workers = ranks(2)
        client = serve(workers, served)
        sizes = {"buffer_bytes": 300, "direct_bytes": 200}
        trainers = Trainers(group.ranks, client, sharded, flat, tensor_transport=way, **sizes).opened()
        for seed in range(1, 4):
            report = trainers.send(seed, f"step-{seed}")
            check_served(report, workers, seed)
            assert details_of(report, 0)["way"] == way
        trainers.close()
