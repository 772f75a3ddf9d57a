"""A server of two worker processes that share each parameter, and one of them killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from core.tests.distributed_ranks import process_group
from plugins.vllm.tests import sharded_trainer
from plugins.vllm.tests.conftest import TWO_RANKS, Connect, Lineup, Models
from plugins.vllm.tests.scene import Server, tiny_model
from plugins.vllm.tests.test_trainer_lost import lose_trainer
from weightwire import StateDictSource
from weightwire.errors import OrderError, UpdateRefused, WeightwireError
from weightwire.testing.fixtures import BorrowRanks

pytestmark = pytest.mark.vllm


def check_rounds(server: Server, models: Models, connect: Connect, backend: str) -> None:
    """Several rounds, each to other weights: no call may be given the answer of another one."""
    for number, model in enumerate((models.new, models.old)):
        trainer = connect(server.client, model.module, backend)
        report = trainer.send_weights(weight_version=f"step-{number}")
        trainer.shutdown()
        assert server.greedy() == model.greedy()
        assert server.label() == f"step-{number}"
        assert [worker["revision"] for worker in server.workers()] == [report.revision] * 2
    assert [worker["rank"] for worker in server.workers()] == [0, 1]


@pytest.mark.parametrize("backend", ["nccl", "ipc", "nccl_m2n"])
def test_rounds(two_ranks: Server, models: Models, connect: Connect, backend: str) -> None:
    check_rounds(two_ranks, models, connect, backend)


@pytest.mark.parametrize("backend", ["nccl", pytest.param("ipc", marks=pytest.mark.thorough)])
def test_after_a_refusal(two_ranks: Server, models: Models, connect: Connect, backend: str) -> None:
    weights = {name: tensor.detach() for name, tensor in models.new.module.state_dict().items()}
    weights["model.norm.weight"] = torch.zeros(127, dtype=torch.float32)
    trainer = connect(two_ranks.client, StateDictSource(weights), backend)
    for _ in range(2):
        with pytest.raises(WeightwireError, match=r"model\.norm\.weight"):
            trainer.send_weights(weight_version="refused")
        assert two_ranks.greedy() == models.old.greedy()
    trainer.shutdown()
    with pytest.raises(OrderError, match="no draft model"):
        two_ranks.client.start_weight_update(draft=True)
    check_rounds(two_ranks, models, connect, backend)


@pytest.mark.parametrize(
    ("backend", "point"),
    [
        ("nccl", "trainer.begin"),
        ("ipc", "trainer.sent"),
        pytest.param("nccl_m2n", "communicator.first_piece", marks=pytest.mark.thorough),
    ],
)
def test_after_a_trainer_was_killed(
    ranks: BorrowRanks, two_ranks: Server, models: Models, connect: Connect, backend: str, point: str
) -> None:
    lose_trainer(ranks, two_ranks, models, backend, point, "kill")
    check_rounds(two_ranks, models, connect, backend)


def check_regions(server: Server, models: Models, ranks: BorrowRanks, folder: Path) -> None:
    """Two rounds from four ranks that hold a quarter of each parameter: a worker receives what its part needs."""
    with process_group(ranks, 4, folder) as group:
        port = group.ranks[0].call(sharded_trainer.hold_port)
        group.run(sharded_trainer.shard, models.old.weights)
        group.run(sharded_trainer.open_trainer, server.url, "nccl_m2n", port)
        for number, model in enumerate((models.new, models.old)):
            group.run(sharded_trainer.fill, model.weights)
            report = group.run(sharded_trainer.send, f"regions-{number}")[0]
            assert server.greedy() == model.greedy()
            assert server.label() == f"regions-{number}"
            workers = [rank for rank in report["ranks"] if "commit" in rank["seconds"]]
            assert len(workers) == 2
            for worker in workers:
                assert worker["bytes"] < 0.6 * report["bytes"]
                assert worker["details"]["opaque"] == []
                assert worker["details"]["allocated_bytes"] == (0 if number else worker["bytes"])
        group.run(sharded_trainer.close)


def test_regions_from_a_sharded_trainer(two_ranks: Server, models: Models, ranks: BorrowRanks, tmp_path: Path) -> None:
    check_regions(two_ranks, models, ranks, tmp_path)


def test_refused_when_a_trainer_connects(two_ranks: Server, models: Models, connect: Connect) -> None:
    weights = {name: tensor.detach() for name, tensor in models.new.module.state_dict().items()}
    weights["model.norm.weight"] = torch.zeros(127, dtype=torch.float32)
    for _ in range(2):
        with pytest.raises(UpdateRefused, match=r"model\.norm\.weight"):
            connect(two_ranks.client, StateDictSource(weights), "nccl_m2n")
    assert two_ranks.greedy() == models.old.greedy()
    connect(two_ranks.client, models.new.module, "nccl_m2n").send_weights(weight_version="new")
    assert two_ranks.greedy() == models.new.greedy()


def test_a_worker_killed(two_ranks: Server, models: Models, connect: Connect) -> None:
    trainer = connect(two_ranks.client, models.new.module)
    trainer.send_weights(weight_version="before")
    lost = two_ranks.workers()[1]["pid"]
    os.kill(lost, signal.SIGKILL)
    with pytest.raises(WeightwireError, match=rf"worker rank 1.*{lost}|a worker process of this server died"):
        trainer.send_weights(weight_version="lost", timeout=20.0)
    answer = two_ranks.complete()
    assert answer.status_code >= 500
    assert "error" in answer.json()
    assert not two_ranks.healthy()


@pytest.mark.thorough
def test_experts_from_a_sharded_trainer(
    lineup: Lineup, ranks: BorrowRanks, tmp_path_factory: pytest.TempPathFactory
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    made = [
        tiny_model(tmp_path_factory.mktemp("experts"), seed, "Qwen3Moe", head_dim=32, vocab_size=498, **experts)
        for seed in (1, 2)
    ]
    models = Models(*made)
    server = lineup.get(models.old.folder, *TWO_RANKS, VLLM_CPU_OMP_THREADS_BIND="0|1")
    check_regions(server, models, ranks, tmp_path_factory.mktemp("group"))
