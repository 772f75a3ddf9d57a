"""Which rank sends which piece of which parameter, and the addresses that its elements have in a delta.

Every rank computes the same from metadata alone. A piece is what one rank holds of a parameter; of replicas the first
owner sends. The elements of all pieces of a sender, flattened in contiguous order one piece after the other, have
consecutive addresses; pieces of wide elements come first, so that values in the order of their addresses are aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from weightwire.layout import Box, ParamMeta

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one sender holds of one parameter.

    Attributes:
        place: The parameter's place in the metadata.
        box: Which part of the parameter it is; never empty.
        dtype: Of its elements.
    """

    place: int
    box: Box
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.box.numel

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class AddressSpace:
    """The pieces of one sender, in the order of their addresses.

    Attributes:
        sender: Trainer rank.
        pieces: Wide elements first, in metadata order within a width.
    """

    sender: int
    pieces: tuple[Piece, ...]

    @cached_property
    def firsts(self) -> Integers:
        """Address of each piece's first element, and one past the last address of all: one more than pieces."""
        return np.cumsum([0, *(piece.numel for piece in self.pieces)], dtype=np.int64)

    @cached_property
    def widths(self) -> Integers:
        """Bytes of an element of each piece."""
        return np.array([piece.dtype.itemsize for piece in self.pieces], dtype=np.int64)

    @property
    def numel(self) -> int:
        """How many addresses there are."""
        return int(self.firsts[-1])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    @cached_property
    def by_place(self) -> dict[int, int]:
        """Number of the piece of each parameter of which this sender sends one."""
        return {piece.place: number for number, piece in enumerate(self.pieces)}

    def counts(self, addresses: Integers) -> Integers:
        """How many of ascending `addresses` lie in each piece."""
        return np.diff(np.searchsorted(addresses, self.firsts))


def spaces_of(metadata: Sequence[ParamMeta], trainers: int) -> dict[int, AddressSpace]:
    """The address space of each rank that sends anything, by rank in ascending order.

    Args:
        metadata: Every parameter.
        trainers: How many trainer ranks there are.
    """
    pieces: dict[int, list[Piece]] = {}
    for place, meta in enumerate(metadata):
        for rank, box in _senders(meta):
            pieces.setdefault(rank, []).append(Piece(place, box, meta.dtype))
    return {
        rank: AddressSpace(rank, tuple(sorted(pieces[rank], key=lambda piece: -piece.dtype.itemsize)))
        for rank in sorted(pieces)
        if rank < trainers
    }


def _senders(meta: ParamMeta) -> list[tuple[int, Box]]:
    """Each distinct piece, with the first rank that holds it."""
    if meta.placements is None or meta.owners is None:
        box = meta.box(meta.first_owner)
        return [] if box.empty else [(meta.first_owner, box)]
    found: dict[Box, int] = {}
    for rank in meta.owners:
        found.setdefault(meta.box(rank), rank)
    return [(rank, box) for box, rank in found.items() if not box.empty]
