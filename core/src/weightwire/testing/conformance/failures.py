"""Group failure, first part: ranks that die, stop, are slow or raise. All hear who it was, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from weightwire.errors import PeerLost
from weightwire.testing.conformance.check import Check
from weightwire.testing.conformance.judging import Nonconforming
from weightwire.testing.conformance.payloads import blocks
from weightwire.testing.conformance.ranks import defers, heard
from weightwire.testing.conformance.source import FIRST_TENSOR, HALF_SENT
from weightwire.testing.conformance.stage import PEER_TIMEOUT, SECONDS, Scene, Stage, nonconforming, require_words
from weightwire.testing.pool_process import Rank

NOTICED = 2.0
"""Seconds within which a death, an error or a passed deadline has reached everybody."""

STOP_NOTICED = PEER_TIMEOUT + NOTICED
"""Seconds within which a stopped rank is missed."""

_SLOW = 0.5


def two_servers(stage: Stage, **fields: Any) -> Scene:
    """A trainer and two servers, with one round behind them; `fields` go into the init info."""
    scene = stage.scene(blocks(), servers=(1, 1), **fields)
    scene.push(1)
    return scene


def comes_to(rank: Rank, point: str, who: str) -> None:
    """Wait until `rank` is at an armed point."""
    with nonconforming(f"{who} coming to {point}"):
        rank.reached(point, SECONDS)


def _worker_killed(stage: Stage, point: str) -> None:
    scene = two_servers(stage)
    healthy, lost = scene.workers
    lost.at(point, "kill")
    (sending,) = scene.send(2)
    comes_to(lost, point, "worker rank 1")
    what = f"with worker rank 1 killed at {point}"
    _names(scene.error_of(sending, what, NOTICED), lost, what)
    scene.check_old([healthy], 2, after=what)
    _without(scene, lost)


def _worker_stopped(stage: Stage, point: str) -> None:
    scene = two_servers(stage, **stage.impatience())
    healthy, stopped = scene.workers
    stopped.at(point, "stop")
    (sending,) = scene.send(2)
    comes_to(stopped, point, "worker rank 1")
    what = f"with worker rank 1 stopped at {point}"
    error = scene.error_of(sending, what, STOP_NOTICED)
    require_words(error, ["worker rank 1"], what)
    scene.check_old([healthy], 2, after=what)
    _without(scene, stopped)
    stopped.kill()


def _names(error: BaseException, lost: Rank, what: str) -> None:
    if not isinstance(error, PeerLost):
        raise Nonconforming(f"{what}: send_weights raised {type(error).__name__} and not PeerLost: {error}")
    require_words(error, ["worker rank 1", str(lost.pid)], what)


def _without(scene: Scene, lost: Rank) -> None:
    """The trainer goes on with whoever is left."""
    left = [rank for rank in scene.workers if rank is not lost]
    scene.only(left)
    scene.push(3, to=left)


def _killed_between_vote_and_commit(stage: Stage) -> None:
    scene = two_servers(stage)
    whole, lost = scene.workers
    lost.at("worker.voted", "kill")
    (sending,) = scene.send(2)
    comes_to(lost, "worker.voted", "worker rank 1")
    what = "with worker rank 1 killed between vote and commit"
    _names(scene.error_of(sending, what, NOTICED), lost, what)
    scene.settle(whole, after=what)
    # The vote was unanimous, so the other server is whole on the new weights, and the next round repairs the rest.
    scene.check_new([whole], 2)
    _without(scene, lost)


def _trainer_killed(stage: Stage, point: str) -> None:
    scene = two_servers(stage)
    (lost,) = scene.trainers
    lost.at(point, "kill")
    scene.send(2)
    comes_to(lost, point, "the trainer")
    scene.check_old(scene.workers, 2, after=f"after the trainer was killed at {point}", seconds=NOTICED)
    scene.replace_trainers(stage.lend(1))
    scene.push(3)


def _trainer_stopped(stage: Stage, point: str) -> None:
    scene = two_servers(stage, **stage.impatience())
    (stopped,) = scene.trainers
    stopped.at(point, "stop")
    scene.send(2)
    comes_to(stopped, point, "the trainer")
    scene.check_old(scene.workers, 2, after=f"after the trainer was stopped at {point}", seconds=STOP_NOTICED)
    stopped.kill()
    scene.replace_trainers(stage.lend(1))
    scene.push(3)


def _slow(stage: Stage, side: str) -> None:
    """Who is slow for a moment is no failure."""
    scene = two_servers(stage)
    rank, point = (scene.workers[1], FIRST_TENSOR) if side == "worker" else (scene.trainers[0], HALF_SENT)
    rank.at(point, "hold")
    (sending,) = scene.send(2)
    comes_to(rank, point, scene.label(rank))
    time.sleep(_SLOW)
    rank.let_go(point)
    with nonconforming(f"a round in which the {side} stood still for {_SLOW} s"):
        sending.result(SECONDS)
    scene.check_new(scene.workers, 2)


def _worker_raises(stage: Stage, point: str) -> None:
    scene = two_servers(stage)
    scene.workers[1].at(point, "raise")
    (sending,) = scene.send(2)
    what = f"with an error raised on worker rank 1 at {point}"
    error = scene.error_of(sending, what)
    require_words(error, ["worker rank 1", point], what)
    scene.check_old(scene.workers, 2, after=what)
    _hear(scene, scene.workers[1:], [point], what)
    scene.push(2)


def _source_raises(stage: Stage) -> None:
    scene = two_servers(stage)
    scene.trainers[0].at(HALF_SENT, "raise")
    (sending,) = scene.send(2)
    what = "with an error raised by the source"
    require_words(scene.error_of(sending, what), [HALF_SENT], what)
    scene.check_old(scene.workers, 2, after=what)
    _hear(scene, scene.workers, ["trainer rank 0", HALF_SENT], what)
    scene.push(2)


def _hear(scene: Scene, workers: Sequence[Rank], words: Sequence[str], what: str) -> None:
    """The workers' side knows too, in the words of the rank that failed."""
    for rank in workers:
        if not rank.call(defers):
            require_words(rank.call(heard), words, f"{scene.label(rank)} {what}")


POINTS: Final = ("worker.begin", FIRST_TENSOR, "worker.received", "worker.vote")
_TRAINER_POINTS: Final = ("trainer.begin", HALF_SENT, "trainer.sent")


def _at(point: str) -> str:
    return point.replace(".", "-").replace("_", "-")


CHECKS: Final = (
    *(Check("failure", f"killed-at-{_at(point)}", partial(_worker_killed, point=point)) for point in POINTS),
    Check("failure", "killed-between-vote-and-commit", _killed_between_vote_and_commit),
    *(
        Check(
            "failure",
            f"stopped-at-{_at(point)}",
            partial(_worker_stopped, point=point),
            expensive=point != FIRST_TENSOR,
        )
        for point in POINTS
    ),
    *(Check("failure", f"killed-at-{_at(point)}", partial(_trainer_killed, point=point)) for point in _TRAINER_POINTS),
    *(
        Check(
            "failure",
            f"stopped-at-{_at(point)}",
            partial(_trainer_stopped, point=point),
            expensive=point != HALF_SENT,
        )
        for point in _TRAINER_POINTS
    ),
    Check("failure", "slow-worker", partial(_slow, side="worker")),
    Check("failure", "slow-trainer", partial(_slow, side="trainer")),
    *(Check("failure", f"error-at-{_at(point)}", partial(_worker_raises, point=point)) for point in POINTS[1:]),
    Check("failure", "error-in-the-source", _source_raises),
)
