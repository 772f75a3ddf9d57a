"""Regions that overlap, as disjoint ones: an element that a worker reads twice crosses once.

A region that has digits is a product: a set of coordinates for each dimension. So are intersections and
differences of such regions, dimension by dimension, and so the atoms: the largest products whose elements belong
to the same regions. What an element is linked to (where it goes, or where it came from) is a sum of one term for each
coordinate, which keeps an atom a region on that side as well once it is cut where the term ceases to be affine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weightwire.region import Region
from weightwire.region_boxes import Cut, Digit, coordinates, digits, intersect, row_major, select, span
from weightwire.resharding.source_layout import Integers


class Link(NamedTuple):
    """What the elements of an atom are linked to.

    Attributes:
        slot: The ordinal of the pair that it comes from.
        region: Of the same sizes as the atom's.
        repeat_sizes: Axes along which each element is linked again, beside those of the atom.
        repeat_strides: Of those axes.
    """

    slot: int
    region: Region
    repeat_sizes: tuple[int, ...]
    repeat_strides: tuple[int, ...]


class Atom(NamedTuple):
    """A region that has no element twice, and all its links."""

    region: Region
    links: tuple[Link, ...]


def disjoint(pairs: Sequence[tuple[Region, Region]], shape: Sequence[int]) -> list[Atom]:
    """Atoms that share no element, and hold together what the first region of each pair does.

    Args:
        pairs: Two regions of equal sizes: one of a contiguous tensor of shape `shape`, and what it is linked to.
        shape: Of the tensor.

    Returns:
        Atoms in which each element has the links of all pairs that hold it, by slot. Regions that overlap nothing stay
        as they are, but for axes of stride 0, which become repeats, and the order of the axes: coarsest stride first.
    """
    merged: dict[Region, list[Link]] = {}
    for slot, (region, linked) in enumerate(pairs):
        if region.numel:
            bare, link = _ordered(slot, region, linked)
            merged.setdefault(bare, []).append(link)
    atoms = [Atom(region, tuple(links)) for region, links in merged.items()]
    if all(map(_injective, atoms)) and _spans_apart(atoms):
        return atoms
    products = [product for atom in atoms for product in _products(atom, shape)]
    found: list[Atom] = []
    for component in _components(products):
        found += [component[0].atom] if len(component) == 1 else _refine(component, shape)
    return found


def _ordered(slot: int, region: Region, linked: Region) -> tuple[Region, Link]:
    axes = sorted(zip(region.strides, region.sizes, linked.strides, strict=True), reverse=True)
    moving = [axis for axis in axes if axis[0] and axis[1] > 1]
    repeats = [axis for axis in axes if not axis[0] and axis[1] > 1]
    sizes = tuple(size for _, size, _ in moving)
    link = Link(
        slot,
        Region(linked.offset, sizes, tuple(stride for _, _, stride in moving)),
        tuple(size for _, size, _ in repeats),
        tuple(stride for _, _, stride in repeats),
    )
    return Region(region.offset, sizes, tuple(stride for stride, _, _ in moving)), link


def _injective(atom: Atom) -> bool:
    """Whether the strides are a mixed radix, so that no element is met twice."""
    reach = 0
    for size, stride in zip(reversed(atom.region.sizes), reversed(atom.region.strides), strict=True):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _spans_apart(atoms: Sequence[Atom]) -> bool:
    spans = sorted(span(atom.region) for atom in atoms)
    return all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


class _Product:
    """An atom that is a product of coordinate sets, none of which holds a value twice."""

    def __init__(self, atom: Atom, found: Sequence[Digit], shape: Sequence[int]) -> None:
        self.atom = atom
        self.first = coordinates(atom.region.offset, shape)
        self.along = [[digit for digit in found if digit.dim == dim] for dim in range(len(shape))]
        self.last = [
            at + sum((digit.size - 1) * digit.step for digit in along)
            for at, along in zip(self.first, self.along, strict=True)
        ]

    def values(self, dim: int) -> Integers:
        """The coordinates along a dimension, in the order of `terms`."""
        return self._sums(dim, self.first[dim], [digit.step for digit in self.along[dim]])

    def terms(self, dim: int, link: Link) -> Integers:
        """What each coordinate along a dimension adds to the position of the link."""
        return self._sums(dim, 0, [digit.multiple * link.region.strides[digit.axis] for digit in self.along[dim]])

    def _sums(self, dim: int, first: int, steps: Sequence[int]) -> Integers:
        sums = np.full(1, first, np.int64)
        for digit, step in zip(self.along[dim], steps, strict=True):
            sums = np.add.outer(sums, np.arange(digit.size) * step).reshape(-1)
        return sums

    def twice(self, dim: int) -> bool:
        """Whether a coordinate comes twice."""
        if len(self.along[dim]) < 2:
            return False
        values = self.values(dim)
        return len(np.unique(values)) < len(values)


def _products(atom: Atom, shape: Sequence[int]) -> Iterator[_Product]:
    """The atom as products: one where it has digits and meets no element twice."""
    pending = [
        Atom(piece.source, tuple(link._replace(region=select(link.region, piece.target)) for link in atom.links))
        for piece in intersect(atom.region, shape, (0,) * len(shape), shape)
    ]
    while pending:
        part = pending.pop()
        found = digits(part.region, shape)
        assert not isinstance(found, Cut), part
        product = _Product(part, found, shape)
        twice = next((dim for dim in range(len(shape)) if product.twice(dim)), None)
        if twice is None:
            yield product
        else:
            pending += _slices(part, max(product.along[twice], key=lambda digit: digit.step).axis)


def _slices(atom: Atom, axis: int) -> list[Atom]:
    """The atom at each index of an axis."""
    sizes = (*atom.region.sizes[:axis], 1, *atom.region.sizes[axis + 1 :])
    places = range(atom.region.sizes[axis])

    def at(region: Region, index: int) -> Region:
        return Region(region.offset + index * region.strides[axis], sizes, region.strides)

    return [
        Atom(at(atom.region, index), tuple(link._replace(region=at(link.region, index)) for link in atom.links))
        for index in places
    ]


def _components(products: Sequence[_Product]) -> list[list[_Product]]:
    """Products that overlap, directly or through others, by the first of each."""
    low = np.array([product.first for product in products], np.int64)
    high = np.array([product.last for product in products], np.int64)
    root = list(range(len(products)))

    def find(index: int) -> int:
        while root[index] != index:
            root[index] = root[root[index]]
            index = root[index]
        return index

    for index, product in enumerate(products):
        near = ((low[:index] <= high[index]) & (high[:index] >= low[index])).all(axis=1)
        for other in np.flatnonzero(near).tolist():
            if all(_meet(product, products[other], dim) for dim in range(low.shape[1])):
                one, two = find(index), find(other)
                root[max(one, two)] = min(one, two)
    found: dict[int, list[_Product]] = {}
    for index, product in enumerate(products):
        found.setdefault(find(index), []).append(product)
    return list(found.values())


def _meet(one: _Product, two: _Product, dim: int) -> bool:
    """Whether two products have a coordinate in common."""
    along = one.along[dim], two.along[dim]
    if one.first[dim] == two.first[dim] or one.last[dim] == two.last[dim]:
        return True
    if all(len(each) == 1 and each[0].step == 1 for each in along):
        return one.first[dim] <= two.last[dim] and two.first[dim] <= one.last[dim]
    return bool(np.intersect1d(one.values(dim), two.values(dim), assume_unique=True).size)


class _Run(NamedTuple):
    """Coordinates of one dimension, in arithmetic progression, that the same products hold, with affine terms."""

    start: int
    size: int
    step: int
    held: int  # a bit for each product
    terms: dict[int, tuple[int, int]]  # for each product's every link, by ordinal: first term and its step


def _refine(component: Sequence[_Product], shape: Sequence[int]) -> Iterator[Atom]:
    """The atoms of products that overlap."""
    owner = [index for index, product in enumerate(component) for _ in product.atom.links]
    links = [link for product in component for link in product.atom.links]
    strides = row_major(shape)
    partial: list[tuple[int, tuple[_Run, ...]]] = [((1 << len(component)) - 1, ())]
    for dim in range(len(shape)):
        runs = _runs(component, dim)
        partial = [(held & run.held, (*chosen, run)) for held, chosen in partial for run in runs if held & run.held]
    for held, chosen in partial:
        sizes = tuple(run.size for run in chosen)
        position = sum(run.start * stride for run, stride in zip(chosen, strides, strict=True))
        steps = tuple(run.step * stride for run, stride in zip(chosen, strides, strict=True))
        found = []
        for ordinal, link in enumerate(links):
            if held >> owner[ordinal] & 1:
                terms = [run.terms[ordinal] for run in chosen]
                offset = link.region.offset + sum(first for first, _ in terms)
                found.append(link._replace(region=Region(offset, sizes, tuple(step for _, step in terms))))
        found.sort(key=lambda link: link.slot)
        yield Atom(Region(position, sizes, steps), tuple(found))


def _runs(component: Sequence[_Product], dim: int) -> list[_Run]:
    every = np.unique(np.concatenate([product.values(dim) for product in component]))
    masks = [0] * len(every)
    terms: list[dict[int, int]] = [{} for _ in every]
    ordinal = 0
    for index, product in enumerate(component):
        places = np.searchsorted(every, product.values(dim)).tolist()
        of_links = [product.terms(dim, link).tolist() for link in product.atom.links]
        for k, place in enumerate(places):
            masks[place] |= 1 << index
            for number, of_link in enumerate(of_links):
                terms[place][ordinal + number] = of_link[k]
        ordinal += len(of_links)
    groups: dict[int, list[int]] = {}
    for place, mask in enumerate(masks):
        groups.setdefault(mask, []).append(place)
    values = every.tolist()
    return [run for mask, places in groups.items() for run in _progressions(values, terms, places, mask)]


def _progressions(values: list[int], terms: list[dict[int, int]], places: list[int], mask: int) -> Iterator[_Run]:
    def difference(before: int, after: int) -> tuple[int, dict[int, int]]:
        return values[after] - values[before], {k: terms[after][k] - term for k, term in terms[before].items()}

    at = 0
    while at < len(places):
        end = at + 1
        step, slopes = (
            difference(places[at], places[end]) if end < len(places) else (0, dict.fromkeys(terms[places[at]], 0))
        )
        while end < len(places) and difference(places[end - 1], places[end]) == (step, slopes):
            end += 1
        first = terms[places[at]]
        yield _Run(values[places[at]], end - at, step, mask, {k: (first[k], slopes[k]) for k in first})
        at = end
