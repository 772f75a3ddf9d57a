"""Rounds into a stock vLLM server: its greedy tokens are those of the trainer's model."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient as StockClient

from plugins.vllm.tests.conftest import Connect, Models
from plugins.vllm.tests.scene import Server
from weightwire.errors import WeightwireError

pytestmark = pytest.mark.vllm

PROMPTS = ((5, 6, 7, 8), (100, 3, 99), tuple(range(200, 240)))


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_greedy_tokens_are_the_trainers(server: Server, models: Models, connect: Connect, backend: str) -> None:
    before = server.workers()[0]["revision"]
    report = connect(server.client, models.new.module, backend).send_weights(weight_version="step-1")
    assert [server.greedy(prompt) for prompt in PROMPTS] == [models.new.greedy(prompt) for prompt in PROMPTS]
    assert server.label() == report.label == "step-1"
    assert server.workers()[0]["revision"] == report.revision != before
    assert (report.transport, report.scope, report.parameters) == (backend, "full", 27)
    assert {"nccl": "gloo", "ipc": "memory"}[backend] in report.path
    assert report.ranks[-1].details["copied"] == 27


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_rounds_over_one_link(server: Server, models: Models, connect: Connect, backend: str) -> None:
    trainer = connect(server.client, models.new.module, backend)
    first = trainer.send_weights(weight_version="one")
    second = trainer.send_weights(weight_version="two", pause="keep")
    assert second.revision["number"] == first.revision["number"] + 1
    assert second.previous == first.revision
    assert not second.reinitialised
    assert server.label() == "two"
    assert server.greedy() == models.new.greedy()
    assert not server.paused()


def test_the_prefix_cache_is_of_the_new_weights(server: Server, models: Models, connect: Connect) -> None:
    prompt = tuple(range(10, 170))
    assert server.greedy(prompt) == server.greedy(prompt) == models.old.greedy(prompt)
    connect(server.client, models.new.module).send_weights()
    assert server.greedy(prompt) == models.new.greedy(prompt)


@pytest.mark.parametrize("pause", [None, "keep", "wait", "abort"])
def test_the_operators_pause_outlasts_an_update(
    server: Server, models: Models, connect: Connect, pause: str | None
) -> None:
    trainer = connect(server.client, models.new.module)
    server.client.pause("keep")
    try:
        trainer.send_weights(weight_version="while paused", pause=pause)
        assert server.paused()
    finally:
        server.client.resume()
    assert server.greedy() == models.new.greedy()
    assert server.label() == "while paused"


def test_asleep_it_refuses(server: Server, models: Models, connect: Connect) -> None:
    trainer = connect(server.client, models.new.module)
    server.post("/sleep", level="1").raise_for_status()
    try:
        with pytest.raises(WeightwireError, match="asleep: wake it up first"):
            trainer.send_weights(weight_version="asleep")
    finally:
        server.post("/wake_up").raise_for_status()
    assert server.greedy() == models.old.greedy()
    assert server.label() == "old"
    trainer.send_weights(weight_version="awake")
    assert server.greedy() == models.new.greedy()


def test_vllms_own_client(server: Server, models: Models, connect: Connect) -> None:
    connect(StockClient(server.url), models.new.module, world_size=2).send_weights(weight_version="by vLLM's client")
    assert server.greedy() == models.new.greedy()
    assert server.label() == "by vLLM's client"


def test_calls_out_of_order_are_refused(server: Server, models: Models) -> None:
    for path, body in (("/update_weights", {"update_info": {}}), ("/finish_weight_update", None)):
        answer = server.post(path, body)
        assert answer.status_code >= 400
        assert "call start_weight_update first" in answer.text
    assert server.greedy() == models.old.greedy()
