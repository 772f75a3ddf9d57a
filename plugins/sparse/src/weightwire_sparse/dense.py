"""Rounds in which every piece goes whole: which chunks travel, and how they become what a worker's model loads.

Each sender sends its own pieces, so nobody gathers. A worker receives into its model's memory where a tensor lands
there whole, else piece by piece into the full tensor, of which it then takes what its load plan says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightwire.layout import ParamMeta
from weightwire.load_plan import Copy, LoadPlan
from weightwire.packing import Chunk, plan_chunks
from weightwire.region import Region
from weightwire_sparse.pieces import AddressSpace, Piece


@dataclass(frozen=True)
class DensePlan:
    """What travels in a dense round; the same on every rank.

    Attributes:
        pieces: Of all senders, in the order of their parameters.
        metadata: Each piece as a tensor of its own.
        chunks: What goes as one message.
    """

    pieces: tuple[Piece, ...]
    metadata: tuple[ParamMeta, ...]
    chunks: tuple[Chunk, ...]


def dense_plan(spaces: Mapping[int, AddressSpace], buffer_bytes: int) -> DensePlan:
    """The plan of all senders' pieces.

    Args:
        spaces: See `spaces_of`.
        buffer_bytes: Size of a ring buffer.
    """
    owned = sorted(
        ((piece, rank) for rank, space in spaces.items() for piece in space.pieces),
        key=lambda pair: (pair[0].place, pair[1]),
    )
    metadata = tuple(
        ParamMeta(f"{piece.place}/{rank}", piece.dtype, piece.box.shape, owners=(rank,)) for piece, rank in owned
    )
    return DensePlan(
        tuple(piece for piece, _ in owned), metadata, tuple(plan_chunks(metadata, buffer_bytes=buffer_bytes))
    )


class DenseLanding:
    """Where the pieces of one dense round go, on a worker.

    Args:
        plan: What travels.
        metadata: The parameters.
        load_plan: What the worker's model takes of them.
        memory: Where that lands, see `WeightSink.landing`.
        device: Where tensors are put together that do not land whole.

    Attributes:
        targets: Memory for the pieces that are received where they belong.
    """

    def __init__(
        self,
        plan: DensePlan,
        metadata: Sequence[ParamMeta],
        load_plan: LoadPlan,
        memory: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self._metadata = metadata
        self._by_name = {meta.name: meta for meta in metadata}
        self.memory = memory
        self._device = device
        self._copies: dict[str, list[Copy]] = {}
        for copy in load_plan.copies:
            self._copies.setdefault(copy.source, []).append(copy)
        self._pieces = {meta.name: piece for meta, piece in zip(plan.metadata, plan.pieces, strict=True)}
        self._whole = {name: tensor for name in self._copies if (tensor := self._landing_whole(name)) is not None}
        self._missing: dict[int, int] = {}
        self._full: dict[int, Tensor] = {}
        self.targets = {
            name: target
            for name, piece in self._pieces.items()
            if (target := self._place(piece)) is not None and target.is_contiguous()
        }

    def _landing_whole(self, name: str) -> Tensor | None:
        """The memory of a tensor that lands whole, once and in its own order."""
        (copy, *others), memory = self._copies[name], self.memory
        flat = memory.get(copy.target)
        meta = self._by_name[name]
        if others or flat is None or flat.dtype != meta.dtype:
            return None
        ends = (Region(0, (meta.numel,), (1,)), Region(copy.target_region.offset, (meta.numel,), (1,)))
        if (copy.source_region, copy.target_region) != ends:
            return None
        return flat[copy.target_region.offset :][: meta.numel].view(meta.shape)

    def _place(self, piece: Piece) -> Tensor | None:
        whole = self._whole.get(self._metadata[piece.place].name)
        return None if whole is None else whole[piece.box.slices()]

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Take pieces that were not received where they belong; they are gone afterwards."""
        for name, tensor in pairs:
            piece = self._pieces[name]
            target = self._place(piece)
            if target is not None:
                target.copy_(tensor)
            elif self._metadata[piece.place].name in self._copies:
                self._assemble(piece, tensor)

    def _assemble(self, piece: Piece, tensor: Tensor) -> None:
        meta, place = self._metadata[piece.place], piece.place
        if piece.numel == meta.numel:
            self._install(meta, tensor)
            return
        if place not in self._full:
            self._full[place] = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
            self._missing[place] = meta.numel
        self._full[place][piece.box.slices()].copy_(tensor)
        self._missing[place] -= piece.numel
        if not self._missing[place]:
            self._install(meta, self._full.pop(place))

    def _install(self, meta: ParamMeta, full: Tensor) -> None:
        flat = full.reshape(-1)
        for copy in self._copies[meta.name]:
            memory = self.memory.get(copy.target)
            if memory is not None:
                part(memory.view(meta.dtype), copy.target_region).copy_(part(flat, copy.source_region))


def part(flat: Tensor, region: Region) -> Tensor:
    """A region of a flat tensor, as a view."""
    return flat.as_strided(region.sizes, region.strides, flat.storage_offset() + region.offset)
