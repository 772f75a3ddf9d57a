"""Changing some elements of a live tensor, and taking it back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightwire.errors import UpdateRefused
from weightwire.inventory import Entry
from weightwire.sink import Patch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True, eq=False)
class ReadyPatch:
    """A checked patch over one piece of memory; writes O(changed) and remembers what was there."""

    memory: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor
    before: torch.Tensor | None = None

    def apply(self) -> None:
        """Write the values."""
        self.before = self.memory.index_select(0, self.offsets)
        self.memory.index_copy_(0, self.offsets, self.values)

    def undo(self) -> None:
        """Write back what `apply` found."""
        if self.before is not None:
            self.memory.index_copy_(0, self.offsets, self.before)


def check_patch(patch: Patch, entry: Entry, *, cast: bool) -> None:
    """Compare a patch with the parameter it is for.

    Raises:
        UpdateRefused: Positions are not 1-D int32 or int64, out of range or repeated; there are not as many values;
            their dtype is another one.
    """
    tensor, positions, values = entry.tensors[0], patch.positions, patch.values

    def refuse(words: str) -> UpdateRefused:
        return UpdateRefused(f"the patch of {patch.name!r} {words}", parameter=patch.name)

    if entry.copied_because not in (None, "DTensor"):
        raise refuse(f"cannot be applied to a {entry.copied_because}")
    if positions.dtype not in (torch.int32, torch.int64) or positions.dim() != 1:
        raise refuse(f"needs 1-D int32 or int64 positions, not {tuple(positions.shape)} of {positions.dtype}")
    if values.shape != positions.shape:
        raise refuse(f"has {positions.numel()} positions for values of shape {tuple(values.shape)}")
    if values.dtype != tensor.dtype and not (cast and torch.can_cast(values.dtype, tensor.dtype)):
        raise refuse(f"has values of {values.dtype}, and the parameter is {tensor.dtype}")
    if not positions.numel():
        return
    ordered = positions
    if not bool((positions[1:] > positions[:-1]).all()):
        ordered = positions.sort().values
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.numel():
            raise refuse(f"names position {int(repeated[0])} twice")
    if int(ordered[0]) < 0 or int(ordered[-1]) >= tensor.numel():
        outside = int(ordered[0]) if int(ordered[0]) < 0 else int(ordered[-1])
        raise refuse(f"names position {outside} of {tensor.numel()} elements")


def ready_patch(patch: Patch, entry: Entry, target: torch.Tensor) -> ReadyPatch:
    """`patch`, which `check_patch` has passed, for the memory of `target`: the local tensor of `entry` or a copy of it.

    Positions count in the contiguous order of the full tensor; `target` may have any strides, and may be a piece.
    """
    positions = patch.positions.to(target.device, torch.int64)
    values = patch.values.detach().to(target.device, target.dtype).contiguous()
    if entry.box is None and target.is_contiguous():
        memory, offsets = target.view(-1), positions
    else:
        offsets, mine = _offsets(positions, entry, target)
        values = values[mine]
        last = sum((size - 1) * step for size, step in zip(target.size(), target.stride(), strict=True))
        memory = target.as_strided((last + 1 if target.numel() else 0,), (1,))
    bits = _BITS.get(target.dtype.itemsize)
    if bits is not None:
        memory, values = memory.view(bits), values.view(bits)
    return ReadyPatch(memory, offsets, values)


def _offsets(positions: torch.Tensor, entry: Entry, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in the memory of `target` the positions lie, and a mask of those that lie there at all."""
    shape = entry.tensors[0].shape
    starts = (0,) * len(shape) if entry.box is None else entry.box.start
    offsets, rest = torch.zeros_like(positions), positions
    mine = torch.ones_like(positions, dtype=torch.bool)
    for dim in reversed(range(len(shape))):
        index = rest % shape[dim] - starts[dim]
        rest = rest // shape[dim]
        mine &= (index >= 0) & (index < target.size(dim))
        offsets += index * target.stride(dim)
    return offsets[mine], mine
