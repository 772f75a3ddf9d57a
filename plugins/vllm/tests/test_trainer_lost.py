"""A trainer that is killed or stopped, at every phase: old answers, whole, never paused, and the next push works."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests.conftest import Connect, Models
from plugins.vllm.tests.scene import Server, open_trainer, send
from weightwire.testing.fixtures import BorrowRanks

pytestmark = pytest.mark.vllm

POINTS = {
    "nccl": ("trainer.begin", "communicator.first_piece", "trainer.sent"),
    "ipc": ("trainer.begin", "ipc.slot", "trainer.sent"),
    "nccl_m2n": ("communicator.first_piece",),
}


def lose_trainer(ranks: BorrowRanks, server: Server, models: Models, backend: str, point: str, action: Any) -> None:
    """Kill or stop a trainer at `point`, and see that the server goes on as before."""
    (trainer,) = ranks(1)
    # One that has stopped is noticed by its silence.
    impatient = {"peer_timeout": 3.0} if action == "stop" else {}
    trainer.call(open_trainer, server.url, models.new.weights, backend, **impatient)
    trainer.at(point, action)
    trainer.start(send, "lost", pause="wait")
    trainer.reached(point)
    # It is asked again and again: it may be waiting inside the update that its trainer has left.
    until = time.monotonic() + 30
    while any(worker["update"] != "none" for worker in server.workers()):
        assert time.monotonic() < until, server.workers()
        time.sleep(0.05)
    assert server.greedy() == models.old.greedy()
    assert server.label() == "old"
    assert not server.paused()
    assert all(worker["weights"] == "whole" for worker in server.workers())
    if action == "stop":
        trainer.kill()


@pytest.mark.parametrize(
    ("backend", "point", "action"),
    [
        # One that has stopped is noticed by its silence, which takes a while.
        pytest.param(backend, point, action, marks=[pytest.mark.thorough] * (action == "stop" and "trainer" in point))
        for backend, points in POINTS.items()
        for point in points
        for action in ("kill", "stop")
    ],
)
def test_old_weights_and_the_next_push_works(
    ranks: BorrowRanks, server: Server, models: Models, connect: Connect, backend: str, point: str, action: str
) -> None:
    lose_trainer(ranks, server, models, backend, point, action)
    connect(server.client, models.new.module, backend).send_weights(weight_version="next")
    assert server.greedy() == models.new.greedy()
    assert server.label() == "next"


def test_a_trainer_lost_before_its_update(ranks: BorrowRanks, server: Server, models: Models, connect: Connect) -> None:
    (trainer,) = ranks(1)
    trainer.call(open_trainer, server.url, models.new.weights, "nccl")
    server.client.start_weight_update()
    trainer.kill()
    assert server.greedy() == models.old.greedy()
    connect(server.client, models.new.module, takeover=True).send_weights(weight_version="next")
    assert server.greedy() == models.new.greedy()
