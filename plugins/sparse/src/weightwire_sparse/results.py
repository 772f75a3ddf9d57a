"""Digests of what results: both sides digest the same elements, each its own, before anybody commits.

A worker holds what its load plan says. Of every copy of the plan, and every sender's piece of its source, the elements
are digested in one order on both sides; the digests of many copies are summed, so that the order of copies is free
and few numbers travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from weightwire.errors import ResultDiffers
from weightwire.layout import ParamMeta
from weightwire.load_plan import Copy, LoadPlan
from weightwire.region import Region
from weightwire.region_boxes import intersect
from weightwire.source import as_bytes
from weightwire_sparse.changes import Bytes
from weightwire_sparse.dense import part
from weightwire_sparse.pieces import Piece

_GROUPS = 4096
_MODULUS = 1 << 128

Sums = dict[str, str]
"""Digest in hex by group of parameters."""


class ResultDigests:
    """Sums of digests for one load plan, by sender and group of parameters.

    Args:
        plan: What a worker loads.
        metadata: The parameters.
    """

    def __init__(self, plan: LoadPlan, metadata: Sequence[ParamMeta]) -> None:
        self._metadata = metadata
        self._place = {meta.name: place for place, meta in enumerate(metadata)}
        self._size = -(-len(metadata) // _GROUPS) or 1
        self._from: dict[str, list[tuple[int, Copy]]] = {}
        self._into: dict[str, list[tuple[int, Copy]]] = {}
        for number, copy in enumerate(plan.copies):
            self._from.setdefault(copy.source, []).append((number, copy))
            self._into.setdefault(copy.target, []).append((number, copy))
        self._sums: dict[int, int] = {}

    def of_piece(self, piece: Piece, tensor: Tensor) -> None:
        """Add what a sender's piece holds."""
        name = self._metadata[piece.place].name
        for number, copy in self._from.get(name, ()):
            for found in self._parts(copy, piece):
                self._add(piece.place, number, part(tensor.reshape(-1), found[0]))

    def of_target(self, target: str, flat: Tensor, pieces: Mapping[int, Piece]) -> None:
        """Add what a target holds of one sender's pieces, given by the place of their parameters."""
        for number, copy in self._into.get(target, ()):
            place = self._place[copy.source]
            if place in pieces:
                memory = flat.view(self._metadata[place].dtype)
                for found in self._parts(copy, pieces[place]):
                    self._add(place, number, part(memory, found[1]))

    def _parts(self, copy: Copy, piece: Piece) -> Iterable[tuple[Region, Region]]:
        """Regions of the piece and of the target that hold the same elements."""
        shape = self._metadata[piece.place].shape
        for found in intersect(copy.source_region, shape, piece.box.start, piece.box.stop, copy.target_region):
            yield found.local, found.target

    def _add(self, place: int, number: int, elements: Tensor) -> None:
        digest = hashlib.sha256(number.to_bytes(8, "little"))
        content: Bytes = as_bytes(elements.detach().contiguous().cpu()).numpy()
        digest.update(content.data)
        group = place // self._size
        value = int.from_bytes(digest.digest()[:16], "little")
        self._sums[group] = (self._sums.get(group, 0) + value) % _MODULUS

    def sums(self) -> Sums:
        """What was added, to travel as JSON."""
        return {str(group): f"{value:x}" for group, value in self._sums.items()}

    def compare(self, sent: Sums, *, rank: str) -> None:
        """Compare with a sender's.

        Raises:
            ResultDiffers: The weights that would result are not the sender's.
        """
        own = self.sums()
        for group in sorted({*own, *sent}, key=int):
            if own.get(group) != sent.get(group):
                first = self._metadata[int(group) * self._size]
                words = f"what would result in {first.name!r}" + (" or one after it" if self._size > 1 else "")
                raise ResultDiffers(
                    f"{words} is not what {rank} has: this worker's weights were not those of its revision",
                    transport="sparse_nccl",
                    parameter=first.name,
                )


def distinct_plans(plans: Sequence[LoadPlan]) -> list[LoadPlan]:
    """Each plan once, in the order of the workers."""
    return list({plan.digest(): plan for plan in plans}.values())
