"""What a plan costs, in numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from weightwire.resharding.planner import Plan
from weightwire.resharding.source_layout import Integers

if TYPE_CHECKING:
    from weightwire.load_plan import LoadPlan


@dataclass(frozen=True, slots=True)
class Busiest:
    """The pair of ranks between which most bytes cross; the lowest ranks of equals.

    Attributes:
        trainer: Rank.
        worker: Rank.
        nbytes: From the one to the other.
        messages: In how many messages.
    """

    trainer: int
    worker: int
    nbytes: int
    messages: int


@dataclass(frozen=True, slots=True)
class OpaqueModule:
    """A module that takes checkpoint tensors in full.

    Attributes:
        module: Its path; `""` is the model itself.
        reason: Why.
        nbytes: Of those tensors.
    """

    module: str
    reason: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Loads:
    """What is not plain in a load plan.

    Attributes:
        workers: The ranks that load so.
        opaque: Modules that take tensors in full.
        opaque_bytes: Of the different tensors of those, for one rank.
        unfilled: Targets with elements that nothing writes, and how many.
    """

    workers: tuple[int, ...]
    opaque: tuple[OpaqueModule, ...]
    opaque_bytes: int
    unfilled: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a plan costs.

    Attributes:
        parameters: How many there are.
        parameter_bytes: Of all of them, each once.
        classes: Parameters laid out alike and wanted alike count as one.
        sent: Bytes by trainer rank.
        received: Bytes by worker rank.
        links: Pairs of ranks between which anything crosses.
        busiest: None where nothing crosses.
        wire: Bytes that cross.
        lower_bound: Bytes of different elements that each worker rank reads, summed over the ranks.
        speed: GiB/s that a rank is taken to send or receive.
        unclaimed: Parameters with elements of which no worker takes any, foreign ones too.
        loads: One for each distinct load plan.
        planning_seconds: What planning took.
    """

    parameters: int
    parameter_bytes: int
    classes: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    links: int
    busiest: Busiest | None
    wire: int
    lower_bound: int
    speed: float
    unclaimed: tuple[str, ...]
    loads: tuple[Loads, ...]
    planning_seconds: float

    @property
    def ratio(self) -> float:
        """Bytes on the wire over the lower bound; 1 where nothing has to cross."""
        return self.wire / self.lower_bound if self.lower_bound else 1.0

    @property
    def estimated_seconds(self) -> float:
        """What the rank that sends or receives most needs."""
        return max(*self.sent, *self.received) / (self.speed * 2**30)

    @property
    def opaque_bytes(self) -> int:
        """Bytes of tensors that worker ranks take in full, summed over the ranks."""
        return sum(each.opaque_bytes * len(each.workers) for each in self.loads)

    def to_json(self) -> dict[str, Any]:
        """This in JSON types, with what follows from it."""
        derived = ("ratio", "estimated_seconds", "opaque_bytes")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


def report(plan: Plan, plans_by_rank: Sequence[LoadPlan], *, speed: float, planning_seconds: float) -> PlanReport:
    """What a plan costs.

    Args:
        plan: Of all ranks.
        plans_by_rank: From which it was made: one for each worker rank.
        speed: GiB/s that a rank sends or receives at most.
        planning_seconds: What making it took.
    """
    traffic = plan.traffic()
    return PlanReport(
        parameters=len(plan.layouts),
        parameter_bytes=sum(math.prod(each.shape) * each.itemsize for each in plan.layouts),
        classes=len(plan.classes),
        sent=tuple(traffic.sum(axis=1).tolist()),
        received=tuple(traffic.sum(axis=0).tolist()),
        links=int(np.count_nonzero(traffic)),
        busiest=_busiest(plan, traffic),
        wire=plan.coverage.wire,
        lower_bound=plan.coverage.lower_bound,
        speed=speed,
        unclaimed=plan.coverage.unclaimed,
        loads=_loads(plans_by_rank),
        planning_seconds=planning_seconds,
    )


def _busiest(plan: Plan, traffic: Integers) -> Busiest | None:
    if not traffic.any():
        return None
    trainer, worker = (int(index) for index in np.unravel_index(traffic.argmax(), traffic.shape))
    moves = plan.for_trainer(trainer)
    messages = int(moves.message[moves.receiver == worker].max()) + 1
    return Busiest(trainer, worker, int(traffic[trainer, worker]), messages)


def _loads(plans_by_rank: Sequence[LoadPlan]) -> tuple[Loads, ...]:
    ranks: dict[str, list[int]] = {}
    digests = {id(each): each.digest() for each in plans_by_rank}
    for rank, each in enumerate(plans_by_rank):
        ranks.setdefault(digests[id(each)], []).append(rank)
    return tuple(
        Loads(
            tuple(of),
            tuple(
                OpaqueModule(one.module, one.reason, sum(each.by_name[name].nbytes for name in one.sources))
                for one in each.opaque
            ),
            each.opaque_bytes,
            each.unfilled,
        )
        for of in ranks.values()
        for each in [plans_by_rank[of[0]]]
    )


def shown_bytes(nbytes: float) -> str:
    """`"1.2 GiB"`."""
    power = min(4, max(0, (int(nbytes).bit_length() - 1) // 10))
    return f"{nbytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def shown_seconds(seconds: float) -> str:
    """`"12.3 ms"` or `"4.56 s"`."""
    scale, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * scale:.4g} {unit}"


def shown_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks in few words: `"0-3, 8"`, or `"0, 32, ... 96 (4 ranks)"`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(words) if len(words) <= 4 else f"{words[0]}, {words[1]}, ... {words[-1]} ({len(ranks)} ranks)"
