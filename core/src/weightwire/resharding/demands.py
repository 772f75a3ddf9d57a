"""What the worker ranks want: which elements of which parameter, and where they go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weightwire.errors import MetadataError
from weightwire.region import Region
from weightwire.region_boxes import check_region
from weightwire.resharding.source_layout import SourceLayout


class Demand(NamedTuple):
    """One copy that a worker rank makes.

    Attributes:
        parameter: Index into the metadata.
        source: Region of the parameter, as a contiguous tensor of its full shape.
        target: Whatever the worker calls the memory that it goes to: an ordinal of its own.
        region: Of that memory, with the sizes of `source`. No two demands of a worker write one element.
    """

    parameter: int
    source: Region
    target: int
    region: Region


@dataclass(frozen=True, slots=True)
class Workers:
    """The demands of every worker rank, those of ranks that want the same things held once.

    Attributes:
        plans: Distinct lists of demands, each in record order.
        plan_of: For each worker rank the ordinal of its list.
    """

    plans: tuple[tuple[Demand, ...], ...]
    plan_of: tuple[int, ...]

    @classmethod
    def of(cls, demands: Sequence[Iterable[Demand | tuple[int, Region, int, Region]]]) -> Workers:
        """From a list for each worker rank; ranks with equal lists share one."""
        found: dict[tuple[Demand, ...], int] = {}
        plan_of = tuple(found.setdefault(tuple(Demand(*each) for each in of), len(found)) for of in demands)
        return cls(tuple(found), plan_of)

    def __post_init__(self) -> None:
        assert set(self.plan_of) == set(range(len(self.plans))), self.plan_of


Signature = tuple[tuple[Region, tuple[int, ...]], ...]
"""What a worker wants of one parameter, but for where its targets are: source regions and target strides."""


class Wanted(NamedTuple):
    """The demands of one list on one parameter."""

    signature: int  # an ordinal of `Interned.signatures`
    targets: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interned:
    """Demands by parameter and list, each distinct signature once.

    Attributes:
        signatures: In the order in which they are first met.
        by_plan: For each list the parameters it wants, ascending, and what of them.
    """

    signatures: tuple[Signature, ...]
    by_plan: tuple[dict[int, Wanted], ...]


def intern(layouts: Sequence[SourceLayout], workers: Workers) -> Interned:
    """Group demands by parameter, and check each against it.

    Raises:
        MetadataError: A demand leaves its parameter, or its two regions differ in extent.
    """
    signatures: dict[Signature, int] = {}
    fits: set[tuple[int, tuple[int, ...]]] = set()  # signatures that were checked, and against which shape
    by_plan: list[dict[int, Wanted]] = []
    for plan in workers.plans:
        grouped: dict[int, list[Demand]] = {}
        for demand in plan:
            grouped.setdefault(demand.parameter, []).append(demand)
        of_plan: dict[int, Wanted] = {}
        for parameter in sorted(grouped):
            if not 0 <= parameter < len(layouts):
                raise MetadataError(f"a worker asks for parameter {parameter} of {len(layouts)}")
            of, layout = grouped[parameter], layouts[parameter]
            signature = tuple([(source, region.strides) for _, source, _, region in of])
            ordinal = signatures.setdefault(signature, len(signatures))
            unequal = [source for _, source, _, region in of if source.sizes != region.sizes]
            if unequal or (ordinal, layout.shape) not in fits:
                _check(of, layout)
                fits.add((ordinal, layout.shape))
            of_plan[parameter] = Wanted(
                ordinal, tuple([each[2] for each in of]), tuple([each[3].offset for each in of])
            )
        by_plan.append(of_plan)
    return Interned(tuple(signatures), tuple(by_plan))


def _check(demands: Sequence[Demand], layout: SourceLayout) -> None:
    numel = math.prod(layout.shape)
    for _, source, _, region in demands:
        problem = None
        if source.sizes != region.sizes:
            problem = f"goes to {region}, of other extents"
        else:
            try:
                check_region(source, numel)
            except ValueError:
                problem = f"leaves its shape {layout.shape}"
        if problem is not None:
            raise MetadataError(
                f"what a worker wants of parameter {layout.name!r}, {source}, {problem}: is it the same model?",
                parameter=layout.name,
            )
