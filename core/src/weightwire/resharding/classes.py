"""Parameters that are laid out alike and wanted alike form a class, and the geometry of a class is computed once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightwire.resharding.demands import Interned, Workers
from weightwire.resharding.geometry import Geometry, geometry
from weightwire.resharding.source_layout import Cells, Integers, SourceLayout, cells_of

Groups = tuple[tuple[int, ...], ...]
"""For each cell the trainer ranks that hold it, ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanClass:
    """Parameters with equal shapes and source layouts of which the same worker ranks want the same things.

    Attributes:
        cells: Of the source layout.
        itemsize: Bytes of an element.
        taken: For each list of demands that wants something, by its ordinal, what it takes.
        receivers: For each cell the worker ranks that take something of it, ascending, and the bytes of each.
        total: For each cell the bytes that leave it.
        lower_bound: Bytes of different elements that each worker rank wants, summed over the ranks.
    """

    cells: Cells
    itemsize: int
    taken: dict[int, Geometry]
    receivers: tuple[tuple[list[int], list[int]], ...]
    total: list[int]
    lower_bound: int


class Classes:
    """All classes, in the order in which parameters first need them."""

    def __init__(self, trainers: int, workers: Workers, interned: Interned, buffer: int) -> None:
        self._trainers = trainers
        self._interned = interned
        self._buffer = buffer
        self._ranks = np.array(workers.plan_of, np.int64)
        self._replicas = np.bincount(self._ranks, minlength=len(workers.plans)).tolist()
        self._cells: dict[object, Cells] = {}
        self._geometries: dict[object, Geometry] = {}
        self._ordinals: dict[object, int] = {}
        self._groups: dict[object, Groups] = {}
        self.found: list[PlanClass] = []

    def place(self, layout: SourceLayout, wanted: Sequence[tuple[int, int]]) -> tuple[int, Groups]:
        """The class of a parameter, and who holds each of its cells.

        Args:
            layout: Of the parameter.
            wanted: For each list that wants something of it, ascending, its ordinal and that of the signature.
        """
        ranks = layout.ranks(self._trainers)
        mesh = layout.mesh_shape if layout.mesh_shape is not None and layout.owners else (len(ranks),)
        laid = (layout.shape, mesh, layout.placements)
        cells = self._cells.get(laid)
        if cells is None:
            cells = self._cells[laid] = cells_of(*laid)
        key = (laid, layout.itemsize, tuple(wanted))
        ordinal = self._ordinals.get(key)
        if ordinal is None:
            ordinal = self._ordinals[key] = len(self.found)
            self.found.append(self._make(layout, laid, cells, wanted))
        groups = self._groups.get((laid, ranks))
        if groups is None:
            groups = tuple(tuple(sorted(ranks[position] for position in held)) for held in cells.holders)
            self._groups[laid, ranks] = groups
        return ordinal, groups

    def _make(self, layout: SourceLayout, laid: object, cells: Cells, wanted: Sequence[tuple[int, int]]) -> PlanClass:
        taken: dict[int, Geometry] = {}
        for plan, signature in wanted:
            key = (laid, layout.itemsize, signature)
            if key not in self._geometries:
                most = self._buffer // layout.itemsize
                self._geometries[key] = geometry(layout.shape, cells, self._interned.signatures[signature], most)
            taken[plan] = self._geometries[key]
        receivers = self._receivers(taken, len(cells), layout.itemsize)
        bound = sum(of.distinct * self._replicas[plan] for plan, of in taken.items()) * layout.itemsize
        return PlanClass(cells, layout.itemsize, taken, receivers, [sum(sizes) for _, sizes in receivers], bound)

    def _receivers(
        self, taken: dict[int, Geometry], cells: int, itemsize: int
    ) -> tuple[tuple[list[int], list[int]], ...]:
        of_plan = np.zeros((cells, len(self._replicas)), np.int64)
        for plan, of in taken.items():
            for cell, pieces in of.pieces.items():
                of_plan[cell, plan] = sum(piece.numel for piece in pieces) * itemsize
        known: dict[bytes, tuple[list[int], list[int]]] = {}  # many cells are wanted alike
        for row in of_plan:
            key = row.tobytes()
            if key not in known:
                of_rank = row[self._ranks]
                ranks = np.flatnonzero(of_rank)
                known[key] = ranks.tolist(), of_rank[ranks].tolist()
        return tuple(known[row.tobytes()] for row in of_plan)

    def axes(self) -> tuple[int, int]:
        """The most axes of a piece, and the most axes along which one is repeated."""
        pieces = [piece for of in self._geometries.values() for held in of.pieces.values() for piece in held]
        repeats = [len(write.repeat_sizes) for piece in pieces for write in piece.writes]
        return max((len(piece.sizes) for piece in pieces), default=0), max(repeats, default=0)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The pieces that one list of demands takes of one cell, as columns.

    Attributes:
        rows: piece, nbytes, direct, itemsize, offset, sizes, strides.
        writes: row, slot, offset, strides, repeat sizes, repeat strides.
    """

    rows: Integers
    writes: Integers


def block(of: Geometry, cell: int, itemsize: int, axes: int, repeats: int) -> Block:
    """The columns of a cell's pieces, axes filled up in front to `axes` and `repeats`."""
    rows, writes = [], []
    for index, piece in enumerate(of.pieces[cell]):
        nbytes = math.prod(piece.sizes) * itemsize
        head = (index, nbytes, int(piece.contiguous), itemsize, piece.offset)
        rows.append((*head, *_front(piece.sizes, axes, 1), *_front(piece.strides, axes, 0)))
        for write in piece.writes:
            again = (*_front(write.repeat_sizes, repeats, 1), *_front(write.repeat_strides, repeats, 0))
            writes.append((index, write.slot, write.offset, *_front(write.strides, axes, 0), *again))
    return Block(np.array(rows, np.int64), np.array(writes, np.int64))


def _front(values: tuple[int, ...], length: int, fill: int) -> tuple[int, ...]:
    return (fill,) * (length - len(values)) + values
