"""Which of the writes into one storage count in the end: later ones shadow earlier ones.

Everything here speaks of sets of elements, so the order of a region's axes plays no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from weightwire.load_plan import Axes, last_element
from weightwire.region import Region

MOST_RUNS: Final = 1 << 22
"""Beyond so many contiguous runs, two interleaved regions are not compared element by element."""

_MOST_COMPARED: Final = 1024


@dataclass(eq=False, slots=True)
class Write:
    """One write of the loader: of a checkpoint tensor, or of a constant.

    Attributes:
        region: Where, in its storage.
        constant: It takes no source.
        shadowed: A later write covers it.
        tangled: It overlaps another write in a way that no order-free plan expresses.
    """

    region: Region
    constant: bool = False
    shadowed: bool = False
    tangled: bool = False


def settle(writes: Sequence[Write]) -> None:
    """Mark what is shadowed or tangled among the writes into one storage, given in record order.

    A constant that a later copy covers in part stays, since constants are written first.
    """
    for cluster in _clusters(writes) if len(writes) > 1 else [writes]:
        if not cluster:
            continue
        if len(cluster) == 1:
            cluster[0].tangled = _overlaps_itself(cluster[0].region)
        elif _disjoint([write.region for write in cluster]):
            continue
        elif len(cluster) > _MOST_COMPARED:
            for write in cluster:
                write.tangled = True
        else:
            _compare(cluster)


def _clusters(writes: Sequence[Write]) -> list[list[Write]]:
    """Writes whose intervals touch, each group in record order."""
    order = sorted(range(len(writes)), key=lambda index: (writes[index].region.offset, index))
    found: list[list[int]] = []
    end = -1
    for index in order:
        region = writes[index].region
        if region.offset > end:
            found.append([])
        found[-1].append(index)
        end = max(end, last_element(region))
    return [[writes[index] for index in sorted(group)] for group in found]


def _compare(cluster: Sequence[Write]) -> None:
    """Mark by pairs; a write that is shadowed hinders nobody."""
    for later in range(len(cluster) - 1, -1, -1):
        new = cluster[later]
        if new.shadowed:
            continue
        new.tangled |= _overlaps_itself(new.region)
        for old in cluster[:later]:
            if old.shadowed or _disjoint([old.region, new.region]):
                continue
            if _covers(new.region, old.region):
                old.shadowed = True
            elif not old.constant:
                old.tangled = new.tangled = True


def _by_stride(region: Region) -> list[tuple[int, int]]:
    return list(_sorted_axes(region.sizes, region.strides))


@lru_cache(maxsize=4096)
def _sorted_axes(sizes: Axes, strides: Axes) -> tuple[tuple[int, int], ...]:
    """(stride, size) from the innermost axis outwards, axes that run on merged."""
    axes: list[tuple[int, int]] = []
    for stride, size in sorted((t, n) for n, t in zip(sizes, strides, strict=True) if n != 1):
        if axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = (axes[-1][0], axes[-1][1] * size)
        else:
            axes.append((stride, size))
    return tuple(axes)


def _overlaps_itself(region: Region) -> bool:
    """Whether it may write an element twice; true too where that is hard to tell."""
    reach = 0
    for stride, size in _by_stride(region):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _runs(region: Region) -> tuple[Tensor, int] | None:
    """Where its contiguous runs start, and how long they are; None if they are too many."""
    axes = _by_stride(region)
    length = axes.pop(0)[1] if axes and axes[0][0] == 1 else 1
    if region.numel // length > MOST_RUNS:
        return None
    starts = torch.tensor([region.offset])
    for stride, size in axes:
        starts = (starts[:, None] + torch.arange(size) * stride).reshape(-1)
    return starts, length


def _all_runs(regions: Iterable[Region]) -> tuple[Tensor, Tensor] | None:
    """Starts and ends of the runs of all, by start."""
    starts, ends = [], []
    for region in regions:
        found = _runs(region)
        if found is None:
            return None
        starts.append(found[0])
        ends.append(found[0] + found[1])
    first, order = torch.cat(starts).sort(stable=True)
    return first, torch.cat(ends)[order]


def _disjoint(regions: Sequence[Region]) -> bool:
    """Whether no element is in two of them; False too where that is hard to tell."""
    runs = _all_runs(regions)
    return runs is not None and bool((runs[0][1:] >= runs[1][:-1]).all())


def _covers(outer: Region, inner: Region) -> bool:
    """Whether every element of `inner` is in `outer`; False too where that is hard to tell."""
    if (outer.offset, _by_stride(outer)) == (inner.offset, _by_stride(inner)):
        return True
    a, b = _runs(outer), _runs(inner)
    if a is None or b is None or _overlaps_itself(outer):
        return False
    both = union_size([outer, inner])
    return both == outer.numel


def union_size(regions: Sequence[Region]) -> int:
    """How many elements are in any of them; at most their sum, which it is where that is hard to tell."""
    runs = _all_runs(regions) if regions else None
    if runs is None:
        return sum(region.numel for region in regions)
    starts, ends = runs
    reach = torch.cummax(ends, 0).values
    begin = torch.cat([starts[:1], torch.maximum(starts[1:], reach[:-1])])
    return int((ends - begin).clamp(min=0).sum())
