"""Group failure, second part: broken plans, deadlines, aborts, commits before their time, and closing twice."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal

from weightwire.clients.fanout import FanoutClient
from weightwire.clients.protocol import ControlClient
from weightwire.errors import HandshakeError, SourceMismatch, UpdateRefused, WeightwireError
from weightwire.testing.conformance import ranks as remote
from weightwire.testing.conformance.check import Check
from weightwire.testing.conformance.failures import NOTICED, comes_to, two_servers
from weightwire.testing.conformance.judging import Nonconforming
from weightwire.testing.conformance.payloads import Item, Payload, blocks, small
from weightwire.testing.conformance.source import FIRST_TENSOR, HALF_SENT, Misdeed
from weightwire.testing.conformance.stage import SECONDS, Stage, nonconforming, require_words

_DEADLINE = 1.0


class SpoiledInit(FanoutClient):
    """Tells the workers of other parameters than the trainer sends."""

    def __init__(self, clients: Sequence[ControlClient], how: Literal["order", "size"]) -> None:
        super().__init__(clients)
        self.how = how

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
        """Spoil and pass on."""
        spoiled = copy.deepcopy(init_info)
        records = spoiled["weightwire"]["metadata"]
        if self.how == "order":
            records[0], records[1] = records[1], records[0]
        else:
            records[0]["shape"] = [2 * records[0]["shape"][0], *records[0]["shape"][1:]]
        super().init_weight_transfer_engine(spoiled, timeout=timeout)


def _source_breaks_the_plan(stage: Stage, misdeed: Misdeed) -> None:
    scene = two_servers(stage)
    (sending,) = scene.send(2, misdeed=misdeed)
    what = f"with a source that breaks its metadata ({misdeed})"
    error = scene.error_of(sending, what)
    if not isinstance(error, SourceMismatch):
        raise Nonconforming(f"{what}: send_weights raised no SourceMismatch but {type(error).__name__}: {error}")
    scene.check_old(scene.workers, 2, after=what)
    scene.push(2)


def _peer_breaks_the_plan(stage: Stage, how: Literal["order", "size"]) -> None:
    scene = stage.scene(blocks(), opened=False, behind=partial(SpoiledInit, how=how))
    what = f"with workers that were told another {how} of parameters"
    (opening,) = scene.start_open()
    error = opening.exception(SECONDS)
    if not isinstance(error, HandshakeError):
        raise Nonconforming(f"{what}: trainer_init raised no HandshakeError, it ended with {error!r}")
    scene.check_old(scene.workers, 1, after=what)


_TOO_FEW: Final[Payload] = small()[:-1]
_TOO_MANY: Final[Payload] = (*small(), Item("beyond", (3,)))
_RESHAPED: Final[Payload] = (Item("norm.weight", (34,), small()[0].dtype), *small()[1:])
_RETYPED: Final[Payload] = (Item("norm.weight", (33,)), *small()[1:])


def _model_does_not_fit(stage: Stage, holds: Payload, name: str) -> None:
    """Refused when the link is opened, by a transport that plans there, or else when the round begins."""
    scene = stage.scene(small(), holds=holds, opened=False)
    opened = False
    for _ in range(2):
        what = f"with a model whose {name!r} does not fit"
        error = None if opened else scene.start_open()[0].exception(SECONDS)
        if error is None:
            opened = True
            (sending,) = scene.send(1)
            error = scene.error_of(sending, what)
        if not isinstance(error, UpdateRefused):
            raise Nonconforming(f"{what}: no UpdateRefused was raised but {type(error).__name__}: {error}")
        require_words(error, [name], what)
        scene.check_old(scene.workers, 1, after=what)


def _deadline_with_a_worker_held(stage: Stage, point: str, servers: tuple[int, ...] = (1, 1)) -> None:
    scene = stage.scene(blocks(), servers=servers)
    scene.push(1)
    held = scene.workers[-1]
    held.at(point, "hold")
    began = time.monotonic()
    (sending,) = scene.send(2, timeout=_DEADLINE)
    comes_to(held, point, scene.label(held))
    what = f"with {scene.label(held)} held at {point} and a deadline of {_DEADLINE:g} s, which it ignores,"
    error = scene.error_of(sending, what, began + _DEADLINE + NOTICED - time.monotonic())
    if not isinstance(error, TimeoutError):
        raise Nonconforming(f"{what}: send_weights raised no TimeoutError but {type(error).__name__}: {error}")
    held.let_go(point)
    scene.check_old(scene.workers, 2, after="after the deadline", seconds=2 * NOTICED)
    scene.push(2)


def _deadline_with_the_trainer_held(stage: Stage) -> None:
    """The trainer's process lives, so that only the deadline tells the workers to stop."""
    scene = two_servers(stage)
    scene.trainers[0].at(HALF_SENT, "hold")
    (sending,) = scene.send(2, timeout=_DEADLINE)
    comes_to(scene.trainers[0], HALF_SENT, "the trainer")
    after = f"after a deadline of {_DEADLINE:g} s with the trainer held, so that it ignores its deadline"
    for rank in scene.workers:
        scene.settle(rank, after=after, seconds=_DEADLINE + NOTICED)
    scene.trainers[0].let_go(HALF_SENT)
    scene.error_of(sending, "after a deadline that passed while the source was read")
    scene.check_old(scene.workers, 2, after="after the deadline")
    scene.push(2)


def _abort_in_mid_transfer(stage: Stage) -> None:
    """One server drops the update while all of them wait for the rest of it."""
    scene = two_servers(stage)
    # A source that is there at once is looked at before the round begins, and what fails then is tried again.
    placed = stage.subject.place is not None
    held, point = (scene.workers[1], "worker.received") if placed else (scene.trainers[0], HALF_SENT)
    held.at(point, "hold")
    (sending,) = scene.send(2)
    comes_to(held, point, scene.label(held))
    began = time.monotonic()
    with nonconforming("abort in mid-transfer"):
        scene.clients[0].abort_weight_update(timeout=5.0)
    if (took := time.monotonic() - began) > NOTICED:
        raise Nonconforming(f"abort in mid-transfer took {took:.1f} s: what receives has to look at its deadline")
    held.let_go(point)
    scene.error_of(sending, "after an abort", NOTICED)
    scene.check_old(scene.workers, 2, after="after an abort")
    scene.push(2)


def _nothing_is_live_before_the_vote(stage: Stage) -> None:
    scene = two_servers(stage)
    first, second = scene.workers
    for rank in (first, second):
        rank.at("worker.vote", "hold")
    (sending,) = scene.send(2)
    for rank in (first, second):
        comes_to(rank, "worker.vote", scene.label(rank))
        if found := rank.call(remote.mixed, scene.model, 1, 2):
            raise Nonconforming(f"{scene.label(rank)} before the vote: {found}; a transport never commits")
    for rank in (first, second):
        rank.let_go("worker.vote")
    with nonconforming("a round in which both workers were held before the vote"):
        sending.result(SECONDS)
    scene.check_new(scene.workers, 2)


def _closing_twice(stage: Stage) -> None:
    scene = two_servers(stage)
    with nonconforming("a second shutdown"):
        scene.trainers[0].call(remote.close_trainer, times=2)
        for rank in scene.workers:
            rank.call(remote.close_worker, times=2)
    (sending,) = scene.send(2)
    error = scene.error_of(sending, "after shutdown")
    if not isinstance(error, WeightwireError):
        raise Nonconforming(f"send_weights after shutdown raised {type(error).__name__}: {error}")
    scene.check_old(scene.workers, 2, after="after shutdown")
    scene.open()
    scene.push(2)


_MISDEEDS: Final[tuple[Misdeed, ...]] = ("order", "size", "dtype", "missing", "extra")
_PLANS: Final[tuple[Literal["order", "size"], ...]] = ("order", "size")
_FITS: Final = (
    ("lacks-a-parameter", _TOO_FEW, "mask"),
    ("has-one-more", _TOO_MANY, "beyond"),
    ("other-shape", _RESHAPED, "norm.weight"),
    ("other-dtype", _RETYPED, "norm.weight"),
)

CHECKS: Final = (
    *(Check("failure", f"source-breaks-{one}", partial(_source_breaks_the_plan, misdeed=one)) for one in _MISDEEDS),
    *(Check("failure", f"peer-breaks-{how}", partial(_peer_breaks_the_plan, how=how)) for how in _PLANS),
    *(
        Check("failure", f"model-{title}", partial(_model_does_not_fit, holds=holds, name=name))
        for title, holds, name in _FITS
    ),
    Check("failure", "nothing-live-before-the-vote", _nothing_is_live_before_the_vote),
    Check(
        "failure",
        "deadline-only-worker-held",
        partial(_deadline_with_a_worker_held, point="worker.begin", servers=(1,)),
    ),
    Check("failure", "deadline-worker-held", partial(_deadline_with_a_worker_held, point=FIRST_TENSOR)),
    Check("failure", "deadline-worker-held-at-vote", partial(_deadline_with_a_worker_held, point="worker.vote")),
    Check("failure", "deadline-trainer-held", _deadline_with_the_trainer_held),
    Check("failure", "abort-in-mid-transfer", _abort_in_mid_transfer),
    Check("failure", "closing-twice", _closing_twice),
)
