"""A server of two worker processes that share each parameter, and one of them killed."""

from __future__ import annotations

import os
import signal

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests.conftest import Connect, Models
from plugins.vllm.tests.scene import Server
from plugins.vllm.tests.test_trainer_lost import lose_trainer
from weightwire import StateDictSource
from weightwire.errors import OrderError, WeightwireError
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


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
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


@pytest.mark.parametrize(("backend", "point"), [("nccl", "trainer.begin"), ("ipc", "trainer.sent")])
def test_after_a_trainer_was_killed(
    ranks: BorrowRanks, two_ranks: Server, models: Models, connect: Connect, backend: str, point: str
) -> None:
    lose_trainer(ranks, two_ranks, models, backend, point, "kill")
    check_rounds(two_ranks, models, connect, backend)


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
