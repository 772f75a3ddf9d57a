"""One parameter on both sides of a plan, as pixels: which source cell a pixel is of, and how much of it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from weightwire.region import Region
from weightwire.resharding.planner import Plan
from weightwire.resharding.source_layout import Cells, Integers

Shares = NDArray[np.float64]

_MOST: Final = 240
_SAMPLES: Final = 6


@dataclass(frozen=True, slots=True)
class Projection:
    """A tensor as a rectangle: some leading dimensions run down it, the rest across.

    Attributes:
        shape: Of the tensor.
        down: How many dimensions run down: all but the last, unless a later one is cut on the source side and the cut
            could not be seen among them.
    """

    shape: tuple[int, ...]
    down: int

    @classmethod
    def of(cls, shape: tuple[int, ...], cells: Cells) -> Projection:
        """The projection in which the cells can be seen."""
        cut = [dim for dim in range(1, len(shape)) if cells.start[:, dim].any()]
        return cls(shape, cut[0] if cut else max(len(shape) - 1, 0))

    @property
    def extents(self) -> tuple[int, int]:
        """Rows and columns, in elements."""
        return math.prod(self.shape[: self.down]), math.prod(self.shape[self.down :])

    def samples(self) -> list[Integers]:
        """Flat positions of elements, an array of pixels each: the one in a pixel's middle first.

        A tensor of few elements has a pixel for each, and one array.
        """
        middles, places = [], np.random.default_rng(0)
        for size in self.extents:
            middles.append((np.arange(min(size, _MOST)) + 0.5) * (size / min(size, _MOST)))
        rows, columns = self.extents
        found = [np.add.outer(middles[0].astype(np.int64) * columns, middles[1].astype(np.int64))]
        if max(rows, columns) > _MOST:
            for _ in range(_SAMPLES - 1):
                at: list[Shares] = []
                for size, middle in zip(self.extents, middles, strict=True):
                    spread = places.uniform(-0.5, 0.5, found[0].shape) * (size / len(middle))
                    at.append(spread + (middle[:, None] if not at else middle[None, :]))
                found.append(at[0].astype(np.int64) * columns + at[1].astype(np.int64))
        return found


def cells_at(positions: Integers, shape: Sequence[int], cells: Cells) -> Integers:
    """The cell that holds each flat position."""
    found = np.zeros(positions.shape, np.int64)
    index = np.unravel_index(positions, tuple(shape)) if shape else ()
    for cell in range(1, len(cells)):
        inside = np.ones(positions.shape, np.bool_)
        for at, start, stop in zip(index, cells.start[cell].tolist(), cells.stop[cell].tolist(), strict=True):
            inside &= (at >= start) & (at < stop)
        found[inside] = cell
    return found


def contains(region: Region, positions: Integers) -> NDArray[np.bool_]:
    """Which flat positions a region without negative strides reads."""
    axes = sorted(((t, n) for t, n in zip(region.strides, region.sizes, strict=True) if t and n > 1), reverse=True)
    if not region.numel:
        return np.zeros(positions.shape, np.bool_)
    return _reached(positions - region.offset, axes)


def _reached(rest: Integers, axes: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which of the numbers are a sum of one multiple of each stride, smaller than its size."""
    if not axes:
        return np.equal(rest, 0)
    (stride, size), *finer = axes
    if sum((count - 1) * step for step, count in finer) < stride:  # as the finest digits of a number: no choice
        return _reached(rest - np.clip(rest // stride, 0, size - 1) * stride, finer)
    few = min(range(len(axes)), key=lambda axis: axes[axis][1])
    (stride, size), others = axes[few], [*axes[:few], *axes[few + 1 :]]
    found = np.zeros(rest.shape, np.bool_)
    for index in range(size):
        found |= _reached(rest - index * stride, others)
    return found


def readers(plan: Plan, parameter: int) -> dict[tuple[Region, ...], list[int]]:
    """The worker ranks that read something of a parameter, those together that read the same of it."""
    wanted = [
        tuple(dict.fromkeys(each.source for each in demands if each.parameter == parameter and each.source.numel))
        for demands in plan.workers.plans
    ]
    found: dict[tuple[Region, ...], list[int]] = {}
    for rank, of in enumerate(plan.workers.plan_of):
        if wanted[of]:
            found.setdefault(wanted[of], []).append(rank)
    return found


def share_read(regions: Sequence[Region], samples: Sequence[Integers]) -> Shares:
    """How much of each pixel regions read, from 0 to 1."""
    read = [np.any([contains(region, positions) for region in regions], axis=0) for positions in samples]
    return np.asarray(np.mean(read, axis=0))


def most_telling(plan: Plan) -> int | None:
    """The largest parameter that is sharded on either side; the largest of all where none is, None where none is.

    Of equals the first.
    """
    best: tuple[bool, int, int] | None = None
    for index, (layout, instance) in enumerate(zip(plan.layouts, plan.instances, strict=True)):
        numel = math.prod(layout.shape)
        parts = len(instance.of.cells) > 1 or any(taken.distinct < numel for taken in instance.of.taken.values())
        key = (parts, numel * layout.itemsize, -index)
        if numel and (best is None or key > best):
            best = key
    return None if best is None else -best[2]
