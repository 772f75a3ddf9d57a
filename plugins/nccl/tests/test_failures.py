"""Ranks that die, stop or raise in the middle of a transfer: the others hear who it was, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from plugins.nccl.tests.fleet import (
    State,
    hold_port,
    model_checksums,
    open_trainer,
    send,
    weights,
    without,
)
from weightwire.clients.fanout import FanoutClient
from weightwire.errors import PeerFailed, PeerLost, TransferAborted, TransferError
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank
from weightwire.testing.workers import host_workers

STALL_LIMIT, PEER_TIMEOUT = 2.0, 3.0
IMPATIENT: dict[str, Any] = {"stall_limit": STALL_LIMIT, "peer_timeout": PEER_TIMEOUT}
COUNT, BYTES = 16, 4 << 20


def blocks(state: State, value: float = 0.0, count: int = COUNT, nbytes: int = BYTES) -> nn.Module:
    """A model of `count` parameters of `nbytes` each, all of one value."""
    parameters = {
        f"block_{place}": nn.Parameter(torch.full((nbytes // 2,), value + place, dtype=torch.bfloat16))
        for place in range(count)
    }
    state["model"] = model = nn.Module()
    for name, parameter in parameters.items():
        model.register_parameter(name, parameter)
    return model


def info(state: State) -> dict[str, Any]:
    """What this rank's worker says of itself."""
    answer: dict[str, Any] = state["worker"].info()
    return answer


class Scene:
    """A trainer and two servers, linked, with one round behind them."""

    def __init__(self, ranks: BorrowRanks, *, count: int = COUNT, nbytes: int = BYTES, **mine: Any) -> None:
        self.trainer, *self.workers = ranks(3)
        self.clients = [host_workers([rank], blocks, 0.0, count, nbytes) for rank in self.workers]
        self.trainer.call(
            open_trainer,
            FanoutClient(self.clients),
            model=blocks,
            arguments=(7.0, count, nbytes),
            # A window is an eighth of the model: who is held, stopped or killed in mid-transfer holds the sender up.
            packed_buffer_size_bytes=1 << 20,
            **mine,
        )
        self.old = [rank.call(model_checksums) for rank in self.workers]

    def send(self) -> Any:
        return self.trainer.start(send)

    def check_old(self, workers: list[Rank]) -> None:
        for rank in workers:
            settled(lambda rank=rank: rank.call(info)["update"] == "none")  # type: ignore[misc]
            assert rank.call(info)["weights"] == "whole"
            assert rank.call(model_checksums) == self.old[self.workers.index(rank)]

    def send_without(self, lost: Rank) -> None:
        left = [place for place, rank in enumerate(self.workers) if rank is not lost]
        self.trainer.call(without, FanoutClient([self.clients[place] for place in left]))
        sent = self.trainer.call(send, "again")
        assert sent["report"]["reinitialised"]
        for place in left:
            assert self.workers[place].call(model_checksums) == sent["checksums"]


def settled(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    """Wait until `condition` holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not settle in time"
        time.sleep(0.01)


POINTS = [
    pytest.param("worker.begin", marks=pytest.mark.thorough),
    "communicator.first_piece",
    pytest.param("worker.received", marks=pytest.mark.thorough),
    "worker.vote",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_killed_at_any_point_before_the_vote(ranks: BorrowRanks, point: str) -> None:
    scene = Scene(ranks)
    healthy, lost = scene.workers
    lost.at(point, "kill")
    sending = scene.send()
    lost.reached(point)
    began = time.monotonic()
    with pytest.raises(PeerLost, match=rf"worker rank 1.*{lost.pid}"):
        sending.result()
    assert time.monotonic() - began < 2.0
    scene.check_old([healthy])
    scene.send_without(lost)


@pytest.mark.parametrize("point", ["communicator.first_piece", pytest.param("worker.vote", marks=pytest.mark.thorough)])
def test_a_worker_stopped(ranks: BorrowRanks, point: str) -> None:
    scene = Scene(ranks, **IMPATIENT)
    healthy, stopped = scene.workers
    stopped.at(point, "stop")
    sending = scene.send()
    stopped.reached(point)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="worker rank 1"):
        sending.result()
    # While bytes move the stall limit notices; afterwards the rendezvous does, after its own time of silence.
    assert time.monotonic() - began < max(STALL_LIMIT, PEER_TIMEOUT) + 1.0
    scene.check_old([healthy])
    scene.send_without(stopped)
    stopped.kill()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("trainer.begin", marks=pytest.mark.thorough),
        "communicator.first_piece",
        pytest.param("trainer.sent", marks=pytest.mark.thorough),
    ],
)
def test_the_trainer_killed(ranks: BorrowRanks, point: str) -> None:
    scene = Scene(ranks)
    scene.trainer.at(point, "kill")
    scene.send()
    scene.trainer.reached(point)
    scene.check_old(scene.workers)
    (new,) = ranks(1)
    new.call(open_trainer, FanoutClient(scene.clients), model=blocks, arguments=(9.0,))
    sent = new.call(send)
    assert [rank.call(model_checksums) for rank in scene.workers] == [sent["checksums"]] * 2


def test_the_trainer_stopped(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, **IMPATIENT)
    scene.trainer.at("communicator.first_piece", "stop")
    scene.send()
    scene.trainer.reached("communicator.first_piece")
    for rank in scene.workers:
        settled(lambda rank=rank: rank.call(info)["update"] == "none", STALL_LIMIT + 1.0)  # type: ignore[misc]
    scene.check_old(scene.workers)
    scene.trainer.kill()


def test_a_worker_that_raises_is_quoted(ranks: BorrowRanks) -> None:
    scene = Scene(ranks)
    scene.workers[1].at("worker.received", "raise")
    with pytest.raises((TransferError, PeerFailed), match=r"worker rank 1.*worker\.received"):
        scene.send().result()
    scene.check_old(scene.workers)
    sent = scene.trainer.call(send)
    assert [rank.call(model_checksums) for rank in scene.workers] == [sent["checksums"]] * 2


def test_a_worker_killed_between_vote_and_commit_is_named(ranks: BorrowRanks) -> None:
    scene = Scene(ranks)
    whole, lost = scene.workers
    lost.at("worker.voted", "kill")
    with pytest.raises(PeerLost, match="worker rank 1"):
        scene.send().result()
    # The vote was unanimous, so the other server is whole on the new weights, and the next round repairs the rest.
    assert whole.call(model_checksums) != scene.old[0]
    scene.send_without(lost)


def test_abort_takes_effect_at_once(ranks: BorrowRanks) -> None:
    scene = Scene(ranks)
    # A receiver that is held keeps the sender waiting in the middle of the transfer.
    scene.workers[1].at("communicator.first_piece", "hold")
    sending = scene.send()
    scene.workers[1].reached("communicator.first_piece")
    began = time.monotonic()
    scene.clients[0].abort_weight_update()
    assert time.monotonic() - began < 0.5
    with pytest.raises((TransferAborted, PeerFailed), match="abort"):
        sending.result()
    scene.workers[1].let_go("communicator.first_piece")
    scene.check_old(scene.workers)
    sent = scene.trainer.call(send)
    assert [rank.call(model_checksums) for rank in scene.workers] == [sent["checksums"]] * 2


def test_the_deadline_of_send_weights_is_kept(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, count=2)
    scene.workers[1].at("worker.vote", "hold")
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="worker rank 1"):
        scene.trainer.start(send, None, timeout=1.0).result()
    assert time.monotonic() - began < 3.0
    scene.workers[1].let_go("worker.vote")
    scene.check_old(scene.workers)
    sent = scene.trainer.call(send)
    assert [rank.call(model_checksums) for rank in scene.workers] == [sent["checksums"]] * 2


def test_a_second_trainer_rank_killed(ranks: BorrowRanks) -> None:
    first, second, worker = ranks(3)
    client = host_workers([worker], weights)
    port = first.call(hold_port)
    opening = [
        rank.start(open_trainer, client, rank=place, count=2, owned=True, port=port)
        for place, rank in enumerate((first, second))
    ]
    for call in opening:
        call.result()
    old = worker.call(model_checksums)
    second.at("communicator.first_piece", "kill")
    sending = first.start(send)
    second.start(send)
    second.reached("communicator.first_piece")
    began = time.monotonic()
    with pytest.raises(PeerLost, match=rf"trainer rank 1.*{second.pid}"):
        sending.result()
    assert time.monotonic() - began < 2.0
    settled(lambda: worker.call(info)["update"] == "none")
    assert worker.call(model_checksums) == old


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_in_the_middle_of_a_gibibyte(ranks: BorrowRanks, action: Any) -> None:
    scene = Scene(ranks, count=64, nbytes=16 << 20, **(IMPATIENT if action == "stop" else {}))
    healthy, lost = scene.workers
    lost.at("communicator.first_piece", action)
    sending = scene.send()
    lost.reached("communicator.first_piece")
    began = time.monotonic()
    with pytest.raises(PeerLost, match="worker rank 1"):
        sending.result()
    assert time.monotonic() - began < (2.0 if action == "kill" else STALL_LIMIT + 1.0)
    scene.check_old([healthy])
    scene.send_without(lost)
    if action == "stop":
        lost.kill()
