"""How parameters lie across the trainer ranks, as plain records, and the cells that makes of a tensor.

Nothing here imports torch: a plan can be made where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from weightwire.errors import MetadataError

if TYPE_CHECKING:
    from weightwire.layout import ParamMeta

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SourceLayout:
    """One parameter as `weightwire.ParamMeta` describes it, with the size of an element in place of its dtype.

    Attributes:
        name: In the checkpoint.
        shape: Full shape.
        itemsize: Bytes of an element.
        owners: Trainer ranks in mesh order; None means every rank, each with all of it.
        mesh_shape: Row-major shape of the mesh over `owners`.
        placements: For each mesh axis the dimension that it shards, or None where it replicates.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[int | None, ...] | None = None

    @classmethod
    def of(cls, meta: ParamMeta) -> Self:
        """The layout that metadata declares."""
        placements = None if meta.placements is None else tuple(getattr(p, "dim", None) for p in meta.placements)
        return cls(meta.name, meta.shape, meta.dtype.itemsize, meta.owners, meta.mesh_shape, placements)

    def ranks(self, trainers: int) -> tuple[int, ...]:
        """The owners, of `trainers` trainer ranks.

        Raises:
            MetadataError: There is no such rank.
        """
        if self.owners is None:
            return tuple(range(trainers))
        if max(self.owners) >= trainers:
            raise MetadataError(
                f"parameter {self.name!r} is owned by trainer rank {max(self.owners)}, and there are {trainers}",
                parameter=self.name,
            )
        return self.owners


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The distinct non-empty boxes of a tensor across its owners, which partition it, by row-major start.

    Attributes:
        start: First index of each cell, shape (cells, dims).
        stop: One past its last index, shape (cells, dims).
        holders: For each cell the positions in the mesh order of the owners that hold it: a replica group.
        of_position: For each position the cell that it holds; -1 where its box is empty.
    """

    start: Integers
    stop: Integers
    holders: tuple[tuple[int, ...], ...]
    of_position: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.holders)

    def shape(self, cell: int) -> tuple[int, ...]:
        """The shape of the local tensor that holds a cell."""
        return tuple(map(int, self.stop[cell] - self.start[cell]))


def boxes(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[int | None] | None
) -> tuple[Integers, Integers]:
    """The box of each mesh position: axis after axis, outer first, a sharded dimension is cut as `torch.chunk` does.

    Returns:
        First indices and one past the last, each of shape (positions, dims).
    """
    positions = math.prod(mesh_shape)
    start = np.zeros((positions, len(shape)), np.int64)
    stop = np.tile(np.asarray(shape, np.int64), (positions, 1))
    index = np.indices(mesh_shape, np.int64).reshape(len(mesh_shape), positions)
    for parts, coordinate, dim in zip(mesh_shape, index, placements or (), strict=bool(placements)):
        if dim is not None:
            end = stop[:, dim]
            step = -((start[:, dim] - end) // parts)
            first = np.minimum(start[:, dim] + coordinate * step, end)
            start[:, dim], stop[:, dim] = first, np.minimum(first + step, end)
    return start, stop


def cells_of(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[int | None] | None) -> Cells:
    """The cells of a tensor that is laid out over a mesh."""
    start, stop = boxes(shape, mesh_shape, placements)
    some = np.flatnonzero((stop > start).all(axis=1))
    if not len(some):
        return Cells(start[:0], stop[:0], (), (-1,) * len(start))
    _, first, group = np.unique(start[some], axis=0, return_index=True, return_inverse=True)
    holders: list[list[int]] = [[] for _ in first]
    of_position = [-1] * len(start)
    for position, cell in zip(some.tolist(), group.reshape(-1).tolist(), strict=True):
        holders[cell].append(position)
        of_position[position] = cell
    kept = some[first]
    return Cells(start[kept], stop[kept], tuple(map(tuple, holders)), tuple(of_position))
