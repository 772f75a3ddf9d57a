"""Group fleet: M trainer ranks to N workers, for several M and N, with owners of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from weightwire.testing.conformance.check import Check
from weightwire.testing.conformance.failures import NOTICED, comes_to
from weightwire.testing.conformance.judging import Nonconforming
from weightwire.testing.conformance.payloads import Payload, twins
from weightwire.testing.conformance.source import HALF_SENT, Owners
from weightwire.testing.conformance.stage import SECONDS, Stage, require_words

_SENDERS: Final = frozenset({"full", "cpu", "multi_sender"})


def _owned(payload: Payload, turns: Sequence[tuple[int, ...]]) -> Owners:
    """The parameters in turn to each of `turns`."""
    return {item.name: turns[place % len(turns)] for place, item in enumerate(payload)}


def _fleet(
    stage: Stage, trainers: int, servers: tuple[int, ...], turns: Sequence[tuple[int, ...]] = (), *, whole: bool = False
) -> None:
    payload = twins()
    owners = _owned(payload, turns) if turns else None
    scene = stage.scene(payload, trainers=trainers, servers=servers, owners=owners, whole=whole)
    for version in (1, 2):
        report = scene.push(version)
    told = [rank["rank"] for rank in report["ranks"]]
    wanted = [*(f"trainer rank {at}" for at in range(trainers)), *(f"worker rank {at}" for at in range(sum(servers)))]
    if told != wanted:
        raise Nonconforming(f"the report is about {', '.join(told)} and not about {', '.join(wanted)}")


def _another_trainer_rank_killed(stage: Stage) -> None:
    scene = stage.scene(twins(), trainers=2, servers=(1, 1))
    scene.push(1)
    lost = scene.trainers[1]
    lost.at(HALF_SENT, "kill")
    sending, _ = scene.send(2)
    comes_to(lost, HALF_SENT, "trainer rank 1")
    what = "with trainer rank 1 killed in mid-transfer"
    require_words(scene.error_of(sending, what, NOTICED), ["trainer rank 1", str(lost.pid)], what)
    scene.check_old(scene.workers, 2, after=what)


def _other_senders_refused(stage: Stage) -> None:
    """Parameters that only rank 1 owns are sent or refused, not lost."""
    scene = stage.scene(twins(), trainers=2, owners=_owned(twins(), [(0,), (1,)]), opened=False)
    what = "with parameters owned by trainer rank 1, and no capability 'multi_sender'"
    errors = [call.exception(SECONDS) for call in scene.start_open()]
    if not any(errors):
        errors = [call.exception(SECONDS) for call in scene.send(1)]
    if not all(errors):
        silent = [scene.label(rank) for rank, error in zip(scene.trainers, errors, strict=True) if error is None]
        raise Nonconforming(f"{what}: {' and '.join(silent)} did not refuse; declare it, or refuse it")
    scene.check_old(scene.workers, 1, after=what)


CHECKS: Final = (
    Check("fleet", "1-to-3", partial(_fleet, trainers=1, servers=(1, 1, 1))),
    Check("fleet", "1-to-a-server-of-2", partial(_fleet, trainers=1, servers=(2,))),
    Check("fleet", "2-to-1-replicated", partial(_fleet, trainers=2, servers=(1,))),
    Check(
        "fleet", "3-to-2-servers-replicated", partial(_fleet, trainers=3, servers=(1, 2), whole=True), expensive=True
    ),
    Check("fleet", "2-to-2-all-owned-by-rank-0", partial(_fleet, trainers=2, servers=(1, 1), turns=((0,),))),
    Check("fleet", "2-to-2-owned-in-turn", partial(_fleet, trainers=2, servers=(1, 1), turns=((0,), (1,))), _SENDERS),
    Check("fleet", "2-to-1-owned-by-rank-1", partial(_fleet, trainers=2, servers=(1,), turns=((1,),)), _SENDERS),
    Check(
        "fleet",
        "3-to-2-a-rank-that-owns-nothing",
        partial(_fleet, trainers=3, servers=(2,), turns=((0,), (2, 0), (2,)), whole=True),
        _SENDERS,
    ),
    Check(
        "fleet",
        "4-to-3-owners-overlap",
        partial(_fleet, trainers=4, servers=(1, 2), turns=((0, 1), (1, 2), (3, 0), (2,))),
        _SENDERS,
        expensive=True,
    ),
    Check("fleet", "other-senders-are-refused", _other_senders_refused, lacks="multi_sender"),
    Check("fleet", "another-trainer-rank-killed", _another_trainer_rank_killed),
)
