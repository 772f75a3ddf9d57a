"""Where the elements of a patch land: through the copies of a load plan, in time proportional to the patch.

A plan says of a box of a checkpoint tensor where it lies in the box and where it lands. Positions in a box are
turned into the axes of such a region by division, coarsest stride first, which tells those outside it too: so tensor
parallelism, fused and stacked parameters, transposed, padded and tied ones are all the same. Of a box that comes as a
whole no positions are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from weightwire.layout import Box
from weightwire.load_plan import Copy, normal_pair
from weightwire.patching import CheckedPatch, ReadyPatch, bits
from weightwire.region import Region
from weightwire.region_boxes import intersect, span


class PatchRoutes:
    """The copies of a load plan, or of what stands for one, as ways for patches.

    Args:
        copies: From contiguous checkpoint tensors into flat targets.

    Attributes:
        reason: Why not every element of a source has one known way; None if all have.
    """

    def __init__(self, copies: Iterable[Copy]) -> None:
        self._by_source: dict[str, list[Copy]] = {}
        self.reason: str | None = None
        for copy in copies:
            self._by_source.setdefault(copy.source, []).append(copy)
            if self.reason is None and not _separable(copy.source_region):
                self.reason = f"the parts of {copy.source!r} that are loaded overlap: {copy.source_region}"

    def ready(self, patches: Iterable[CheckedPatch], flat: Mapping[str, Tensor]) -> list[ReadyPatch]:
        """What changes in the targets, in the order of the patches.

        Args:
            patches: Those of sources without copies change nothing.
            flat: The targets; elements of as many bytes as the patches' values.
        """
        return [
            ready
            for patch in patches
            for copy in self._by_source.get(patch.name, ())
            for ready in _ready(patch, copy, flat[copy.target])
        ]

    def outcome(
        self, patches: Iterable[CheckedPatch], targets: Iterable[str], flat: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """What the targets would be with the patches: see `WeightSink.outcome`.

        Args:
            patches: Applied in this order, to a copy.
            targets: Names.
            flat: Gives what a target holds now.
        """
        coming: dict[str, list[tuple[CheckedPatch, Copy]]] = {}
        for patch in patches:
            for copy in self._by_source.get(patch.name, ()):
                coming.setdefault(copy.target, []).append((patch, copy))
        for name in targets:
            tensor = _with(flat(name), coming.get(name, ()))
            yield name, tensor
            del tensor  # before the next one is made


def _with(flat: Tensor, coming: Iterable[tuple[CheckedPatch, Copy]]) -> Tensor:
    patched = flat
    for patch, copy in coming:
        patched = flat.clone() if patched is flat else patched
        for ready in _ready(patch, copy, patched):
            ready.apply()
    return patched


def _separable(region: Region) -> bool:
    """Whether every position has at most one index on the axes that move, which division finds."""
    reach = 0
    for stride, size in sorted(zip(region.strides, region.sizes, strict=True)):
        if stride and size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True


def _ready(patch: CheckedPatch, copy: Copy, flat: Tensor) -> Iterator[ReadyPatch]:
    memory, values = bits(flat), bits(patch.values).to(flat.device)
    assert memory.dtype == values.dtype, (copy.target, flat.dtype, patch.values.dtype)
    for local, target in _parts(patch, copy):
        if patch.positions is None:
            yield ReadyPatch(_part(memory, target), None, _part(values, local), patch.again)
        else:
            for offsets, new in _landing(patch.positions.to(flat.device), values, local, target):
                yield ReadyPatch(memory, offsets, new, patch.again)


def _parts(patch: CheckedPatch, copy: Copy) -> Sequence[tuple[Region, Region]]:
    """Where the elements of a copy lie in the patch's box, and where they land."""
    if patch.box is None:
        return [(copy.source_region, copy.target_region)] if copy.source_region.numel else []
    return _in_box(copy.source_region, copy.target_region, patch.shape, patch.box)


@lru_cache(maxsize=1 << 14)
def _in_box(source: Region, target: Region, shape: tuple[int, ...], box: Box) -> tuple[tuple[Region, Region], ...]:
    """The same in each round, and dearer than a small patch."""
    pieces = intersect(source, shape, box.start, box.stop, target)
    return tuple(normal_pair(piece.local, piece.target) for piece in pieces)


def _part(flat: Tensor, region: Region) -> Tensor:
    return flat.as_strided(region.sizes, region.strides, flat.storage_offset() + region.offset)


def _landing(positions: Tensor, values: Tensor, local: Region, target: Region) -> Iterator[tuple[Tensor, Tensor]]:
    """What lands of values at ascending positions, by a region of the positions' box and one of the target."""
    first, last = _between(positions, *span(local))
    if first == last:
        return
    offsets, inside = _offsets(positions[first:last], local, target)
    values = values[first:last]
    if inside is not None:
        offsets, values = offsets[inside], values[inside]
    for size, stride, step in zip(local.sizes, local.strides, target.strides, strict=True):
        if stride == 0 and size > 1:  # one element lands in many places
            offsets = (offsets[:, None] + step * torch.arange(size, device=offsets.device)).reshape(-1)
            values = values.repeat_interleave(size)
    if offsets.numel():
        yield offsets, values


def _between(positions: Tensor, low: int, high: int) -> tuple[int, int]:
    """Which of ascending positions lie in `[low, high)`."""
    if not len(positions) or low == high:
        return 0, 0
    if low <= int(positions[0]) and int(positions[-1]) < high:
        return 0, len(positions)
    first, last = torch.searchsorted(positions, torch.tensor((low, high), device=positions.device)).tolist()
    return first, last


def _offsets(positions: Tensor, local: Region, target: Region) -> tuple[Tensor, Tensor | None]:
    """Where positions in the span of a separable region land, and which of them are in it; None is all."""
    axes = sorted(zip(local.strides, local.sizes, target.strides, strict=True), reverse=True)
    axes = [(stride, size, step) for stride, size, step in axes if stride and size > 1]
    if [(stride, step) for stride, _, step in axes] == [(1, 1)]:
        shift = target.offset - local.offset
        return positions + shift if shift else positions, None
    rest, inside = positions - local.offset, None
    offsets = torch.full_like(rest, target.offset)
    room = span(local)[1] - local.offset  # what `rest` is less than
    for stride, size, step in axes:
        index = rest if stride == 1 else rest // stride
        rest = rest - index * stride
        if room > size * stride:  # there is a gap before the next index of the axis before
            found = index < size
            inside = found if inside is None else inside & found
        offsets += index * step
        room = stride
    if room > 1:
        found = rest == 0
        inside = found if inside is None else inside & found
    return offsets, inside
