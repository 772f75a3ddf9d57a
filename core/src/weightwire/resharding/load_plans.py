"""What workers want, read from their load plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weightwire.resharding.demands import Demand, Workers

if TYPE_CHECKING:
    from weightwire.layout import ParamMeta
    from weightwire.load_plan import LoadPlan


def workers_of(plans: Sequence[LoadPlan], metadata: Sequence[ParamMeta]) -> Workers:
    """The demands of each worker rank: one for each copy of its plan, targets numbered as in the plan.

    Args:
        plans: One for each worker rank; ranks that load alike share one object, or have plans that are equal.
        metadata: The parameters, every source of the plans among them.
    """
    place = {meta.name: index for index, meta in enumerate(metadata)}
    distinct: dict[str, int] = {}
    lists: list[tuple[Demand, ...]] = []
    plan_of = []
    known: dict[int, int] = {}
    for plan in plans:
        if id(plan) not in known:
            ordinal = known[id(plan)] = distinct.setdefault(plan.digest(), len(lists))
            if ordinal == len(lists):
                lists.append(_demands(plan, place))
        plan_of.append(known[id(plan)])
    return Workers(tuple(lists), tuple(plan_of))


def _demands(plan: LoadPlan, place: dict[str, int]) -> tuple[Demand, ...]:
    target = {one.name: index for index, one in enumerate(plan.targets)}
    return tuple(
        Demand(place[copy.source], copy.source_region, target[copy.target], copy.target_region) for copy in plan.copies
    )
