"""Which elements of a region lie in a box, exactly: the arithmetic that reshards, deltas and pulls are cut with.

A region walks a contiguous tensor with one stride for each of its axes. Where every axis moves along one dimension
of the tensor alone, the axes of a dimension are the *digits* of a coordinate, so the coordinates in an interval
are few products of digit ranges, and the intersection with a box is the product over the dimensions: again
regions. An axis that runs over the end of a dimension is split into two digits where it divides, and the region is
cut in two where it does not: a flat range becomes at most a head, a body and a tail for each dimension, a diagonal
falls into its elements. Nothing is ever rounded to a bounding box.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weightwire.region import Region


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a region that lies in a box; its three regions have equal sizes and the same order of elements.

    Attributes:
        source: The elements, in the tensor.
        local: The same elements, in a contiguous tensor of the box's shape.
        target: Where they go: the part of the region that the source was paired with.
    """

    source: Region
    local: Region
    target: Region


class Digit(NamedTuple):
    """One factor of an axis of a region: adding `multiple` to the index of `axis` moves `step` along `dim`.

    A digit of an axis with stride 0 has `dim` -1 and `step` 0.
    """

    axis: int
    multiple: int
    size: int
    dim: int
    step: int


class Cut(NamedTuple):
    """The region has no digits as a whole: cut `axis` before index `at` and try again."""

    axis: int
    at: int


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def whole(shape: Sequence[int]) -> Region:
    """Every element of a contiguous tensor, in order."""
    return Region(0, tuple(shape), row_major(shape))


def span(region: Region) -> tuple[int, int]:
    """The half-open range of flat positions that a region without negative strides touches; `(0, 0)` if empty."""
    if region.numel == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(region.sizes, region.strides, strict=True))
    return region.offset, region.offset + reach + 1


def check_region(region: Region, numel: int) -> None:
    """Refuse a region that leaves a tensor of `numel` elements.

    Raises:
        ValueError: It has a negative size or stride, unequal lengths, or touches a position outside.
    """
    well_formed = len(region.sizes) == len(region.strides) and min((0, *region.sizes, *region.strides)) >= 0
    if not well_formed or not 0 <= span(region)[0] <= span(region)[1] <= numel:
        raise ValueError(f"{region} does not lie in a tensor of {numel} elements")


def select(region: Region, part: Region) -> Region:
    """The elements of `region` whose positions in its own order are `part`.

    Args:
        region: Of any tensor.
        part: A region of the index space of `region`, a contiguous tensor of shape `region.sizes`, each of whose
            axes moves along one axis of it, as those that `intersect` returns do.
    """
    spaces = row_major(region.sizes)
    index = itertools.pairwise((region.numel, *spaces))
    offset = region.offset + sum(
        part.offset % outer // inner * stride
        for (outer, inner), stride in zip(index, region.strides, strict=True)
        if inner and outer
    )
    strides = []
    for size, stride in zip(part.sizes, part.strides, strict=True):
        axis = next((k for k, space in enumerate(spaces) if region.sizes[k] > 1 and space <= stride), None)
        assert size == 1 or stride == 0 or (axis is not None and stride % spaces[axis] == 0), (region, part)
        strides.append(0 if axis is None else stride // spaces[axis] * region.strides[axis])
    return Region(offset, part.sizes, tuple(strides))


def merge_axes(sizes: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The fewest axes that walk the same elements on every side: size-1 axes dropped, mergeable ones merged.

    Returns:
        The sizes, then each side's strides.
    """
    merged: list[list[int]] = []
    for axis in zip(sizes, *strides, strict=True):
        if axis[0] == 1:
            continue
        if merged and all(outer == inner * axis[0] for outer, inner in zip(merged[-1][1:], axis[1:], strict=True)):
            merged[-1] = [merged[-1][0] * axis[0], *axis[1:]]
        else:
            merged.append(list(axis))
    return tuple(tuple(axis[side] for axis in merged) for side in range(1 + len(strides)))


def intersect(
    source: Region, shape: Sequence[int], start: Sequence[int], stop: Sequence[int], target: Region | None = None
) -> list[Piece]:
    """The part of `source` that lies in a box, as disjoint parts of its index space.

    Args:
        source: A region of a contiguous tensor of shape `shape`, inside it, with strides of at least 0.
        shape: Of the tensor.
        start: The box's first index in every dimension.
        stop: One past its last.
        target: The region that `source` is paired with, of the same sizes; by default the index space of `source`
            itself, a contiguous tensor of its sizes: each piece then tells which part of the region it is.

    Returns:
        Pieces with at least one element; together they hold each element of `source` in the box once (an element
        that `source` reads twice, twice). Their number of axes may differ from that of `source`.
    """
    target = whole(source.sizes) if target is None else target
    assert source.sizes == target.sizes, (source, target)
    pieces: list[Piece] = []
    pending = [(source, target)] if source.numel and all(a < b for a, b in zip(start, stop, strict=True)) else []
    first, last = (_flat(shape, start), _flat(shape, [b - 1 for b in stop]))
    while pending:
        region, paired = pending.pop()
        low, high = span(region)
        if high <= first or last < low:
            continue
        found = digits(region, shape)
        if isinstance(found, Cut):
            pending += [(_cut(region, found, second), _cut(paired, found, second)) for second in (True, False)]
        else:
            pieces += _pieces(region, paired, found, _Box(tuple(shape), tuple(start), tuple(stop)))
    return pieces


def digits(region: Region, shape: Sequence[int]) -> tuple[Digit, ...] | Cut:
    """The axes of a region as digits of the dimensions of a tensor of shape `shape`.

    Returns:
        Digits in the order of the axes, outer digit first; axes of size 1 have none. The index of axis k is the
        sum of `multiple * value` over its digits, and the coordinate along dim d the sum of `step * value` over
        those of d, plus that of the region's first element. Or where to cut a region for which this cannot be.
    """
    strides = row_major(shape)
    first = coordinates(region.offset, shape)
    found: list[Digit] = []
    for axis, (size, stride) in enumerate(zip(region.sizes, region.strides, strict=True)):
        if size > 1:
            of_axis = _digits_of_axis(axis, size, stride, first, shape, strides)
            if isinstance(of_axis, Cut):
                return of_axis
            found += reversed(of_axis)
    for dim, size in enumerate(shape):
        along = sorted((digit for digit in found if digit.dim == dim), key=lambda digit: digit.step)
        reach = first[dim] + sum((digit.size - 1) * digit.step for digit in along)
        if along and reach >= size:  # the digits carry into the next dimension: cut the coarsest before it does
            coarse = along[-1]
            room = size - 1 - (reach - (coarse.size - 1) * coarse.step)
            return Cut(coarse.axis, coarse.multiple * min(max(room // coarse.step + 1, 1), coarse.size - 1))
    return tuple(found)


def coordinates(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index in every dimension of a flat position in a tensor of shape `shape`, which has elements."""
    return tuple(position // stride % size if size else 0 for stride, size in zip(row_major(shape), shape, strict=True))


def _digits_of_axis(
    axis: int, size: int, stride: int, first: Sequence[int], shape: Sequence[int], strides: Sequence[int]
) -> list[Digit] | Cut:
    """The digits of one axis, innermost first."""
    if stride == 0:
        return [Digit(axis, 1, size, -1, 0)]
    found: list[Digit] = []
    multiple = 1
    while True:
        dim = next(dim for dim, inner in enumerate(strides) if inner <= stride and shape[dim] > 1)
        step, rest = divmod(stride, strides[dim])
        if rest:
            return Cut(axis, size // 2 * multiple)
        if first[dim] + step * (size - 1) < shape[dim]:
            return [*found, Digit(axis, multiple, size, dim, step)]
        count, rest = divmod(shape[dim], step)
        if rest or size % count or first[dim] >= step:
            wrap = -((first[dim] - shape[dim]) // step)  # the first value that leaves the dimension
            at = size - size % count if not rest and first[dim] < step else wrap
            return Cut(axis, at * multiple)
        found.append(Digit(axis, multiple, count, dim, step))
        size, stride, multiple = size // count, stride * count, multiple * count


class _Box(NamedTuple):
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]


def _pieces(source: Region, target: Region, found: Sequence[Digit], box: _Box) -> Iterator[Piece]:
    """The part in a box of a region that has digits."""
    first = coordinates(source.offset, box.shape)
    local = row_major([stop - start for start, stop in zip(box.start, box.stop, strict=True)])
    origin = sum((at - low) * stride for at, low, stride in zip(first, box.start, local, strict=True))
    choices: list[list[dict[int, range]]] = []
    for dim, (at, low, high) in enumerate(zip(first, box.start, box.stop, strict=True)):
        along = sorted((k for k, digit in enumerate(found) if digit.dim == dim), key=lambda k: -found[k].step)
        ranges = _ranges([(found[k].size, found[k].step) for k in along], low - at, high - at)
        choices.append([dict(zip(along, each, strict=True)) for each in ranges])
    for choice in itertools.product(*choices):
        taken = {k: range(digit.size) for k, digit in enumerate(found)}
        for each in choice:
            taken |= each
        sizes = tuple(len(taken[k]) for k in range(len(found)))

        def part(
            offset: int, steps: list[int], taken: dict[int, range] = taken, sizes: tuple[int, ...] = sizes
        ) -> Region:
            return Region(offset + sum(taken[k].start * step for k, step in enumerate(steps)), sizes, tuple(steps))

        yield Piece(
            part(source.offset, [digit.multiple * source.strides[digit.axis] for digit in found]),
            part(origin, [digit.step * local[digit.dim] if digit.step else 0 for digit in found]),
            part(target.offset, [digit.multiple * target.strides[digit.axis] for digit in found]),
        )


def _ranges(along: Sequence[tuple[int, int]], low: int, high: int) -> Iterator[tuple[range, ...]]:
    """The products of digit ranges whose sum of `step * value` is in `[low, high)`.

    Args:
        along: Count and step of each digit, coarsest first. 2k - 1 products at most for k digits of a mixed radix;
            overlapping digits, as of a sliding window, are exact too.
        low: Relative to the first coordinate.
        high: One past the last.
    """
    if not along:
        if low <= 0 < high:
            yield ()
        return
    (count, step), finer = along[0], along[1:]
    reach = sum((size - 1) * inner for size, inner in finer)
    begin, end = max(0, -((reach - low) // step)), min(count, -(-high // step))
    full = range(max(begin, -(-low // step)), min(end, (high - 1 - reach) // step + 1))
    everything = tuple(range(size) for size, _ in finer)
    for value in range(begin, min(full.start, end)):
        yield from (
            (range(value, value + 1), *each) for each in _ranges(finer, low - value * step, high - value * step)
        )
    if full:
        yield full, *everything
    for value in range(max(full.start, full.stop), end):
        yield from (
            (range(value, value + 1), *each) for each in _ranges(finer, low - value * step, high - value * step)
        )


def _cut(region: Region, cut: Cut, second: bool) -> Region:
    size, stride = region.sizes[cut.axis], region.strides[cut.axis]
    assert 0 < cut.at < size, (region, cut)
    kept = size - cut.at if second else cut.at
    sizes = (*region.sizes[: cut.axis], kept, *region.sizes[cut.axis + 1 :])
    return Region(region.offset + (cut.at * stride if second else 0), sizes, region.strides)


def _flat(shape: Sequence[int], index: Sequence[int]) -> int:
    return sum(at * stride for at, stride in zip(index, row_major(shape), strict=True))
