"""Ranks that die or stop, seen also by those that exchange no byte with them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from core.tests.sharded_fleet import (
    Named,
    Pairs,
    State,
    boxes,
    change,
    drive,
    heard,
    held,
    info,
    loaded,
    sent_by,
    serve,
)
from plugins.m2n.tests.fleet import Trainers
from weightwire.clients.fanout import FanoutClient
from weightwire.errors import PeerLost
from weightwire.layout import ParamMeta
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank

thorough = pytest.mark.thorough
FIRST = "communicator.first_piece"
SIDE = 3
NOTICED = 2.0
"""Seconds within which a death has to be known to all."""
PEER_TIMEOUT = 2.0
STOP_NOTICED = PEER_TIMEOUT + NOTICED
"""As much for a rank that stops, after the time of silence."""

# Each trainer rank holds what one worker takes, and no other; the last two hold nothing and take nothing.
METADATA = [ParamMeta(f"w{place}", torch.uint8, (2 << 20,), owners=(place,)) for place in range(SIDE - 1)] + [
    ParamMeta("spare", torch.uint8, (5,), owners=(SIDE - 1, 0))
]


def taken(worker: int) -> list[str]:
    return [f"w{worker}", "spare"] if worker == 0 else [f"w{worker}"] if worker < SIDE - 1 else []


def one(state: State, index: int, count: int, worker: int) -> Named:
    """The model of a server of one rank."""
    return Named(METADATA, taken(worker))


class Scene:
    """Three trainer ranks and three servers."""

    def __init__(self, ranks: BorrowRanks, **options: Any) -> None:
        self.options = options
        lent = ranks(2 * SIDE)
        self.trainers, self.workers = lent[:SIDE], lent[SIDE:]
        self.clients = [serve([rank], one, place) for place, rank in enumerate(self.workers)]

    def linked(self) -> Scene:
        """With one round behind them."""
        self.open(self.trainers)
        report = self.fleet.send(1)
        assert sum(map(bool, sent_by(report, "worker rank"))) == SIDE - 1
        self.check(self.workers, 1)
        return self

    def open(self, trainers: list[Rank]) -> None:
        self.start_open(trainers)
        self.fleet.opened()

    def start_open(self, trainers: list[Rank]) -> None:
        self.trainers = trainers
        self.fleet = Trainers(
            trainers,
            FanoutClient(self.clients),
            boxes,
            METADATA,
            # A window is a small part of a parameter: who stands still holds up whoever sends to it.
            buffer_bytes=1 << 15,
            **self.options,
            foreign=[meta.name for meta in METADATA],
        )

    def check(self, workers: list[Rank], seed: int) -> None:
        for rank in workers:
            assert rank.call(held) == loaded(METADATA, taken(self.workers.index(rank)), seed)

    def check_old(self, workers: list[Rank], words: str) -> None:
        """They are idle, whole, as after the first round, and know who was lost."""
        for rank in workers:
            until = time.monotonic() + STOP_NOTICED
            while rank.call(info)["update"] != "none":
                assert time.monotonic() < until, rank.stacks()
                time.sleep(0.01)
            assert rank.call(info)["weights"] == "whole"
            # One that has all its bytes is in no call that could raise.
            assert words in (rank.call(heard) or words), rank.call(heard)
        self.check(workers, 1)

    def fail(self, lost: Rank, label: str, point: str, action: Any, within: float) -> None:
        """`lost` dies or stops at `point` of a round: every other rank names it in time."""
        lost.at(point, action)
        sending = self.fleet.start(2)
        lost.reached(point)
        began = time.monotonic()
        for rank, call in zip(self.trainers, sending, strict=True):
            if rank is not lost:
                error = call.exception()
                assert isinstance(error, PeerLost), error
                assert label in str(error), error
                assert call.ended is not None
                assert call.ended - began < within
        self.check_old([rank for rank in self.workers if rank is not lost], label)
        if point == FIRST and lost in self.trainers:
            assert label in self.workers[self.trainers.index(lost)].call(heard)

    def send_without(self, lost: Rank) -> None:
        """The same trainers go on with the servers that are left."""
        left = [place for place, rank in enumerate(self.workers) if rank is not lost]
        self.fleet.each(drive, FanoutClient([self.clients[place] for place in left]))
        assert self.fleet.send(3)["reinitialised"]
        self.check([self.workers[place] for place in left], 3)
        self.fleet.close()

    def send_with(self, new: Rank, lost: Rank) -> None:
        """A new process takes the place of a trainer rank."""
        self.open([new if rank is lost else rank for rank in self.trainers])
        self.fleet.send(3)
        self.check(self.workers, 3)
        self.fleet.close()


@pytest.mark.parametrize(
    ("worker", "point"),
    [
        (1, FIRST),
        (2, "worker.vote"),  # it receives nothing
        pytest.param(0, FIRST, marks=thorough),
        pytest.param(1, "worker.begin", marks=thorough),
        pytest.param(1, "worker.received", marks=thorough),
        pytest.param(1, "worker.vote", marks=thorough),
        pytest.param(2, "worker.begin", marks=thorough),
    ],
)
def test_a_worker_killed(ranks: BorrowRanks, worker: int, point: str) -> None:
    scene = Scene(ranks).linked()
    lost = scene.workers[worker]
    scene.fail(lost, f"worker rank {worker}", point, "kill", NOTICED)
    scene.send_without(lost)


@pytest.mark.parametrize(("worker", "point"), [(1, FIRST), pytest.param(2, "worker.vote", marks=thorough)])
def test_a_worker_stopped(ranks: BorrowRanks, worker: int, point: str) -> None:
    scene = Scene(ranks, peer_timeout=PEER_TIMEOUT).linked()
    lost = scene.workers[worker]
    scene.fail(lost, f"worker rank {worker}", point, "stop", STOP_NOTICED)
    scene.send_without(lost)
    lost.kill()


@pytest.mark.parametrize(
    ("trainer", "point"),
    [
        (0, FIRST),
        (2, "trainer.sent"),  # it sends nothing
        pytest.param(1, FIRST, marks=thorough),
        pytest.param(0, "trainer.begin", marks=thorough),
        pytest.param(0, "trainer.sent", marks=thorough),
        pytest.param(1, "trainer.begin", marks=thorough),
        pytest.param(1, "trainer.sent", marks=thorough),
    ],
)
def test_a_trainer_rank_killed(ranks: BorrowRanks, trainer: int, point: str) -> None:
    scene = Scene(ranks).linked()
    lost = scene.trainers[trainer]
    scene.fail(lost, f"trainer rank {trainer}", point, "kill", NOTICED)
    (new,) = ranks(1)
    scene.send_with(new, lost)


@pytest.mark.parametrize(
    ("trainer", "point"),
    [(1, FIRST), pytest.param(0, FIRST, marks=thorough), pytest.param(2, "trainer.begin", marks=thorough)],
)
def test_a_trainer_rank_stopped(ranks: BorrowRanks, trainer: int, point: str) -> None:
    scene = Scene(ranks, peer_timeout=PEER_TIMEOUT).linked()
    lost = scene.trainers[trainer]
    scene.fail(lost, f"trainer rank {trainer}", point, "stop", STOP_NOTICED)
    lost.kill()
    (new,) = ranks(1)
    scene.send_with(new, lost)


@pytest.mark.parametrize("side", ["worker", pytest.param("trainer", marks=thorough)])
def test_a_rank_killed_while_it_connects(ranks: BorrowRanks, side: str) -> None:
    """Also those that connect to nobody hear of it."""
    scene = Scene(ranks)
    lost = (scene.workers if side == "worker" else scene.trainers)[1]
    lost.at("communicator.connected", "kill")
    scene.start_open(scene.trainers)
    lost.reached("communicator.connected")
    began = time.monotonic()
    for rank, call in zip(scene.trainers, scene.fleet.opening, strict=True):
        if rank is not lost:
            error = call.exception()
            assert isinstance(error, PeerLost), error
            assert f"{side} rank 1" in str(error)
            assert call.ended is not None
            assert call.ended - began < NOTICED
    (new,) = ranks(1)
    if side == "worker":
        scene.workers[1] = new
        scene.clients[1] = serve([new], one, 1)
        scene.linked()
        scene.fleet.close()
    else:
        scene.send_with(new, lost)


class Moody(Named):
    """Takes nothing while it is in a bad mood; else it casts, so that it has to run."""

    bad = False

    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            if self.bad:
                raise KeyError("not today")
            self.get_parameter(name).data.copy_(tensor.to(torch.int32))


def moody(state: State, index: int, count: int) -> Named:
    return Moody(METADATA[-1:], ["spare"])


def spoil(model: Any) -> None:
    Moody.bad = True  # its twin's mood, too


def soothe(model: Any) -> None:
    Moody.bad = False


def test_a_loader_that_raises_is_quoted(ranks: BorrowRanks) -> None:
    first, second, *workers = ranks(4)
    metadata = [ParamMeta("spare", torch.uint8, (5,), owners=(1,))]
    clients = [serve([workers[0]], moody), serve([workers[1]], one, 0)]
    fleet = Trainers([first, second], FanoutClient(clients), boxes, metadata, "partial").opened()
    fleet.send(1)
    before = [rank.call(held) for rank in workers]
    workers[0].call(change, spoil)
    for error in fleet.send_in_vain(2):
        assert "worker rank 0" in str(error)
        assert "load_weights of Moody raised at 'spare': KeyError: 'not today'" in str(error)
    for rank, old in zip(workers, before, strict=True):
        assert rank.call(info)["weights"] == "whole"
        assert rank.call(held) == old
    workers[0].call(change, soothe)
    assert fleet.send(3)["reinitialised"]
    assert workers[0].call(held) == loaded(metadata, ["spare"], 3)
    fleet.close()
