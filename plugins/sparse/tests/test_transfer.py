"""Changes from sharded trainers to all kinds of workers, between real processes: the same bits as plain loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.tests.distributed_ranks import process_group
from core.tests.sharded_fleet import close_host, details_of, drive, held, info, named, sent_by, serve
from core.tests.sharded_models import flat, hybrid, served, two_ways
from plugins.sparse.tests.changing import changing, loaded_at, served_at, sharded_policy
from plugins.sparse.tests.fleet import Trainers
from weightwire.clients.fanout import FanoutClient
from weightwire.layout import ParamMeta, Replicate, Shard, total_bytes
from weightwire.testing.fixtures import BorrowRanks


def way_of(report: dict[str, Any], rank: int = 0) -> tuple[str, str]:
    (details,) = [one["details"] for one in report["ranks"] if one["rank"] == f"trainer rank {rank}"]
    return details["way"], details["reason"]


@pytest.mark.parametrize("shard", [flat, hybrid, two_ways])
def test_four_sharded_ranks_to_a_tensor_parallel_server(
    ranks: BorrowRanks, tmp_path: Path, shard: Callable[[nn.Module, int], None]
) -> None:
    with process_group(ranks, 4, tmp_path) as group:
        workers = ranks(2)
        client = serve(workers, served)
        trainers = Trainers(group.ranks, client, sharded_policy, shard, checksum=True).opened()
        for step in range(4):
            report = trainers.send(step, f"step-{step}")
            assert way_of(report)[0] == ("delta" if step else "dense")
            for index, worker in enumerate(workers):
                assert worker.call(held) == served_at(index, 2, step)
            assert report["verified"]
        assert [details_of(report, index)["patched"] > 0 for index in range(2)] == [True, True]
        assert client.weight_info()["weight_version"] == "step-3"
        trainers.close()


METADATA = [
    ParamMeta("rows", torch.bfloat16, (37, 8), owners=(0, 1), placements=(Shard(0),)),
    ParamMeta("columns", torch.float32, (6, 22), owners=(1, 0), placements=(Shard(1),)),
    ParamMeta("grid", torch.float64, (9, 10), owners=(0, 1, 2), mesh_shape=(3,), placements=(Shard(1),)),
    ParamMeta("copies", torch.int8, (300,), owners=(2, 1), placements=(Replicate(),)),
    ParamMeta("everywhere", torch.float8_e4m3fn, (5, 40)),
    ParamMeta("waves", torch.complex128, (50,), owners=(1,)),
    ParamMeta("flags", torch.bool, (64,), owners=(0,)),
    ParamMeta("scalar", torch.float32, ()),
    ParamMeta("nothing", torch.float32, (0, 4)),
]
NAMES = [meta.name for meta in METADATA]


@pytest.mark.parametrize("options", [{}, {"kernels": "numpy", "compression": "zstd"}, {"snapshot": "hash"}], ids=str)
def test_three_ranks_to_two_servers(ranks: BorrowRanks, options: dict[str, Any]) -> None:
    trainer_ranks, workers = ranks(3), ranks(2)
    client = FanoutClient([serve([worker], named, METADATA, [NAMES]) for worker in workers])
    trainers = Trainers(trainer_ranks, client, changing, METADATA, verify_every=2, **options).opened()
    for step in range(5):
        report = trainers.send(step)
        for worker in workers:
            assert worker.call(held) == loaded_at(METADATA, NAMES, step)
        assert way_of(report)[0] == "delta" if step and "snapshot" not in options else True
        assert report["parameters"] == len(METADATA)
        assert report["bytes"] == total_bytes(METADATA)
    report = trainers.send(4)
    assert way_of(report)[0] == "delta"
    assert max(sent_by(report, "worker rank")) < 1024
    assert report["revision"]["number"] == 6
    trainers.close()


def test_what_a_late_worker_lacks_it_gets(ranks: BorrowRanks) -> None:
    """A worker that starts anew holds other weights than all others: everybody gets everything, once."""
    trainer_ranks, workers = ranks(3), ranks(1)
    client = serve(workers, named, METADATA, [NAMES])
    trainers = Trainers(trainer_ranks, client, changing, METADATA).opened()
    trainers.send(0)
    assert way_of(trainers.send(1)) == ("delta", "")
    workers[0].call(close_host)
    fresh = serve(workers, named, METADATA, [NAMES])
    trainer_ranks[0].call(drive, fresh)
    report = trainers.send(2)
    assert way_of(report) == ("dense", "worker rank 0 holds weights that this trainer did not send")
    assert workers[0].call(held) == loaded_at(METADATA, NAMES, 2)
    assert way_of(trainers.send(3)) == ("delta", "")
    assert workers[0].call(held) == loaded_at(METADATA, NAMES, 3)
    assert workers[0].call(info)["weights"] == "whole"
    trainers.close()
