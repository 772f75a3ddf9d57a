"""How members tell each other what the workers load."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.tests.epochs import LIMIT, Epoch
from weightwire.deadline import Deadline
from weightwire.errors import HandshakeError, MessageError, UpdateRefused, WeightwireError
from weightwire.exchange import Outcome
from weightwire.layout import Box, ParamMeta
from weightwire.load_plan import LoadPlan
from weightwire.load_plan_exchange import KnownPlans
from weightwire.plan_building import plan_of_boxes
from weightwire.rendezvous import Rendezvous

TRAINERS, WORKERS = 2, 3


def plan(rows: int) -> LoadPlan:
    """What a worker loads that takes so many rows."""
    return plan_of_boxes([(ParamMeta("w", torch.bfloat16, (10, 4)), Box((0, 0), (rows, 4)))])


class Telling:
    """A member that notes what it posts, and may post something else."""

    def __init__(self, member: Rendezvous, instead: Callable[[str, Any], Any] | None = None) -> None:
        self._member = member
        self._instead = instead or (lambda phase, payload: payload)
        self.posted: dict[str, Any] = {}

    @property
    def rank(self) -> int:
        return self._member.rank

    def exchange(self, phase: str, *, payload: Any, **content: Any) -> Outcome:
        self.posted[phase] = payload = self._instead(phase, payload)
        return self._member.exchange(phase, payload=payload, **content)


class Fleet:
    """Members that keep what they know from link to link; each link is an epoch of its own."""

    def __init__(self) -> None:
        self.known = [KnownPlans() for _ in range(TRAINERS + WORKERS)]
        self.telling: list[Telling] = []

    def link(
        self,
        plans: list[LoadPlan | None],
        *,
        error: tuple[int, WeightwireError] | None = None,
        instead: Callable[[str, Any], Any] | None = None,
    ) -> list[Any]:
        """What `exchange` returns or raises on each member; worker 0 may post something else than its own."""
        with Epoch(trainers=TRAINERS, workers=WORKERS) as epoch:
            self.telling = [
                Telling(member, instead if rank == TRAINERS else None) for rank, member in enumerate(epoch.members)
            ]
            own = [None] * TRAINERS + list(plans)
            calls = []
            for rank, telling in enumerate(self.telling):
                failed = error[1] if error is not None and error[0] == rank else None

                def run(_: Rendezvous, rank: int = rank, telling: Any = telling, failed: Any = failed) -> Any:
                    return self.known[rank].exchange(telling, Deadline(LIMIT), own[rank], error=failed)

                calls.append(epoch.start(rank, run))
            return [call.exception(LIMIT) or call.result() for call in calls]

    def bodies(self) -> list[int]:
        """The workers that posted a plan in full."""
        return [rank - TRAINERS for rank, one in enumerate(self.telling) if one.posted["load-plans"] is not None]


def test_equal_plans_travel_once_and_are_one_object() -> None:
    fleet = Fleet()
    told = fleet.link([plan(3), plan(5), plan(3)])
    for plans in told:
        assert plans == [plan(3), plan(5), plan(3)]
        assert plans[0] is plans[2]
    assert fleet.bodies() == [0, 1]
    assert [one.posted["targets"]["digest"] for one in fleet.telling[:TRAINERS]] == [None] * TRAINERS


def test_a_second_link_sends_no_plan_that_all_know() -> None:
    fleet = Fleet()
    first = fleet.link([plan(3), plan(5), plan(3)])
    second = fleet.link([plan(3), plan(5), plan(3)])
    assert fleet.bodies() == []
    assert all(one is other for before, after in zip(first[:TRAINERS], second[:TRAINERS], strict=True)
               for one, other in zip(before, after, strict=True))  # fmt: skip
    third = fleet.link([plan(5), plan(5), plan(7)])
    assert fleet.bodies() == [2]
    assert third[0] == [plan(5), plan(5), plan(7)]
    # What nobody loads any more is forgotten.
    assert sorted(fleet.telling[0].posted["targets"]["known"]) == sorted({plan(3).digest(), plan(5).digest()})
    fleet.link([plan(7)] * 3)
    assert sorted(fleet.telling[0].posted["targets"]["known"]) == sorted({plan(5).digest(), plan(7).digest()})


def test_a_member_that_is_new_is_told_what_the_others_know() -> None:
    fleet = Fleet()
    fleet.link([plan(3), plan(3), plan(5)])
    fleet.known[1] = KnownPlans()
    told = fleet.link([plan(3), plan(3), plan(5)])
    assert told[1] == [plan(3), plan(3), plan(5)]
    assert fleet.bodies() == [0, 2]


def test_a_worker_that_has_none_says_why_to_all() -> None:
    fleet = Fleet()
    own = UpdateRefused("the model has no parameter 'w'", parameter="w")
    told = fleet.link([plan(3), None, plan(3)], error=(TRAINERS + 1, own))
    assert told[TRAINERS + 1] is own
    for rank, error in enumerate(told):
        assert isinstance(error, UpdateRefused)
        assert "the model has no parameter 'w'" in str(error)
        assert error.parameter == "w"
        assert rank == TRAINERS + 1 or error.rank == "worker rank 1"
    assert fleet.link([plan(3), plan(5), plan(3)])[0] == [plan(3), plan(5), plan(3)]


def packed(text: bytes) -> str:
    return base64.b64encode(zlib.compress(text)).decode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (packed(b"another plan"), "not the one whose digest was announced"),
        (packed(b"{}")[:5], "cannot be read"),
        ("no base64!", "cannot be read"),
        (base64.b64encode(b"not compressed").decode(), "cannot be read"),
        (17, "cannot be read"),
    ],
)
def test_a_plan_that_is_not_the_one_announced(body: Any, words: str) -> None:
    fleet = Fleet()
    told = fleet.link([plan(3), plan(5), plan(5)], instead=lambda phase, own: body if phase == "load-plans" else own)
    for rank, error in enumerate(told):
        if rank != TRAINERS:  # who posted it knows better
            assert isinstance(error, HandshakeError), error
            assert words in str(error)
    assert fleet.link([plan(3), plan(5), plan(5)])[0] == [plan(3), plan(5), plan(5)]


class Nonsense(LoadPlan):
    """Tells of itself what is no plan."""

    def to_json(self) -> str:
        return '{"copies": 3}'


def test_a_body_that_is_no_plan() -> None:
    told = Fleet().link([Nonsense(()), plan(5), plan(5)])
    for rank, error in enumerate(told):
        assert rank == TRAINERS or isinstance(error, MessageError)


def test_workers_without_parameters() -> None:
    nothing = LoadPlan(())
    assert Fleet().link([nothing] * WORKERS)[0] == [nothing] * WORKERS
