"""What of a parameter lies in which cell, computed once for all parameters that are laid out and wanted alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weightwire.region import Region
from weightwire.region_boxes import Cut, Digit, coordinates, digits, intersect, merge_axes, row_major, select
from weightwire.resharding.atoms import Atom, disjoint
from weightwire.resharding.demands import Signature
from weightwire.resharding.source_layout import Cells


class Write(NamedTuple):
    """Where a piece goes: `target.as_strided(repeat_sizes + sizes, repeat_strides + strides, offset).copy_(piece)`.

    Attributes:
        slot: The ordinal of the demand in the signature.
        offset: Relative to that of the demand's target region.
        strides: For each axis of the piece.
        repeat_sizes: Axes along which each element is written again.
        repeat_strides: Of those.
    """

    slot: int
    offset: int
    strides: tuple[int, ...]
    repeat_sizes: tuple[int, ...]
    repeat_strides: tuple[int, ...]


class Piece(NamedTuple):
    """Elements of one cell that cross together: `shard.as_strided(sizes, strides, offset)` on the sender.

    Attributes:
        offset: In elements of the cell as a contiguous tensor.
        sizes: Extents; there are no others on the wire, where the piece is contiguous.
        strides: In the cell.
        writes: On the receiver, at least one.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    writes: tuple[Write, ...]

    @property
    def numel(self) -> int:
        """Elements on the wire."""
        return math.prod(self.sizes)

    @property
    def contiguous(self) -> bool:
        """Whether it needs no copy on either side: contiguous in the cell and in its one target."""
        flat = row_major(self.sizes)
        return self.strides == flat and len(self.writes) == 1 and self.writes[0][2:4] == (flat, ())


class Geometry(NamedTuple):
    """What a signature takes of a tensor.

    Attributes:
        distinct: How many different elements it reads.
        pieces: For each cell of which it takes something, its pieces.
    """

    distinct: int
    pieces: dict[int, tuple[Piece, ...]]


def geometry(shape: Sequence[int], cells: Cells, signature: Signature, most: int) -> Geometry:
    """Cut what a signature wants along the cells, and prove that nothing is missing and nothing comes twice.

    Args:
        shape: Of the parameter.
        cells: Of its source layout.
        signature: What is wanted of it.
        most: Elements that a piece may have at most, unless it is contiguous on both sides.
    """
    pairs = [(source, Region(0, source.sizes, strides)) for source, strides in signature]
    atoms = disjoint(pairs, shape)
    found: dict[int, list[Piece]] = {}
    for atom in atoms:
        taken = 0
        for cell, piece in _pieces(atom, shape, cells):
            taken += piece.numel
            found.setdefault(cell, []).extend(_bounded(piece, most))
        assert taken == atom.region.numel, (shape, atom, taken)
    written = sum(link.region.numel * math.prod(link.repeat_sizes) for atom in atoms for link in atom.links)
    assert written == sum(source.numel for source, _ in signature), (shape, signature)
    distinct = sum(atom.region.numel for atom in atoms)
    return Geometry(distinct, {cell: tuple(found[cell]) for cell in sorted(found)})


def _pieces(atom: Atom, shape: Sequence[int], cells: Cells) -> Iterator[tuple[int, Piece]]:
    found = digits(atom.region, shape)
    if isinstance(found, Cut):
        near = list(range(len(cells)))
    else:
        low = coordinates(atom.region.offset, shape)
        reach = [sum((digit.size - 1) * digit.step for digit in found if digit.dim == dim) for dim in range(len(shape))]
        high = np.add(low, reach)
        near = np.flatnonzero(((cells.start <= high) & (cells.stop > np.asarray(low))).all(axis=1)).tolist()
        if len({digit.dim for digit in found}) == len(found):
            yield from _in_cells(atom, found, shape, cells, near)
            return
    for cell in near:
        yield from ((cell, piece) for piece in _in_cell(atom, shape, cells, cell))


def _in_cell(atom: Atom, shape: Sequence[int], cells: Cells, cell: int) -> Iterator[Piece]:
    start, stop = cells.start[cell].tolist(), cells.stop[cell].tolist()
    for piece in intersect(atom.region, shape, start, stop):
        linked = [select(link.region, piece.target) for link in atom.links]
        order = sorted(range(len(piece.local.sizes)), key=lambda axis: -piece.local.strides[axis])
        sides = [[region.strides[axis] for axis in order] for region in (piece.local, *linked)]
        sizes, strides, *targets = merge_axes([piece.local.sizes[axis] for axis in order], *sides)
        yield Piece(
            piece.local.offset,
            sizes,
            strides,
            tuple(
                Write(link.slot, region.offset, target, link.repeat_sizes, link.repeat_strides)
                for link, region, target in zip(atom.links, linked, targets, strict=True)
            ),
        )


def _in_cells(
    atom: Atom, found: Sequence[Digit], shape: Sequence[int], cells: Cells, near: Sequence[int]
) -> Iterator[tuple[int, Piece]]:
    """What `_in_cell` finds in each of many cells, for an atom with at most one digit along each dimension."""
    first = coordinates(atom.region.offset, shape)
    start, stop = cells.start[near], cells.stop[near]
    inner = np.cumprod(np.append(stop - start, np.ones((len(near), 1), np.int64), axis=1)[:, :0:-1], axis=1)[:, ::-1]
    offset = ((np.array(first, np.int64) - start) * inner).sum(axis=1)
    along = sorted(found, key=lambda digit: digit.dim)
    steps = [[digit.multiple * link.region.strides[digit.axis] for digit in along] for link in atom.links]
    targets = [np.full(len(near), link.region.offset) for link in atom.links]
    shapes = []  # of each digit: how much of it is in the cell, and its stride there
    for k, (_, _, size, dim, step) in enumerate(along):
        begin = np.maximum(-((first[dim] - start[:, dim]) // step), 0)
        end = np.minimum(-((first[dim] - stop[:, dim]) // step), size)
        offset = offset + begin * step * inner[:, dim]
        targets = [target + begin * of_link[k] for target, of_link in zip(targets, steps, strict=True)]
        shapes += [np.maximum(end - begin, 0), step * inner[:, dim]]
    columns = [offset.tolist(), *(target.tolist() for target in targets)]
    alike = list(zip(*(column.tolist() for column in shapes), strict=True)) if shapes else [()] * len(near)
    known: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}  # cells of one extent differ in offsets alone
    for cell, key, place, *offsets in zip(near, alike, *columns, strict=True):
        if 0 not in key[::2]:
            merged = known.get(key)
            if merged is None:
                merged = known[key] = merge_axes(key[::2], key[1::2], *steps)
            writes = tuple(
                Write(link.slot, into, target, link.repeat_sizes, link.repeat_strides)
                for link, into, target in zip(atom.links, offsets, merged[2:], strict=True)
            )
            yield cell, Piece(place, merged[0], merged[1], writes)


def _bounded(piece: Piece, most: int) -> Iterator[Piece]:
    """The piece in parts of at most `most` elements, cut along its outermost axes."""
    if piece.numel <= most or piece.contiguous:
        yield piece
        return
    row = piece.numel // piece.sizes[0]
    step = max(1, most // row)
    for index in range(0, piece.sizes[0], step):
        size = min(step, piece.sizes[0] - index)
        keep = slice(1, None) if size == 1 else slice(None)
        part = Piece(
            piece.offset + index * piece.strides[0],
            (size, *piece.sizes[1:])[keep],
            piece.strides[keep],
            tuple(
                write._replace(offset=write.offset + index * write.strides[0], strides=write.strides[keep])
                for write in piece.writes
            ),
        )
        yield from _bounded(part, most)
