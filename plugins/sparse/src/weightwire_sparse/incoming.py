"""What a worker does with decoded changes: memory to receive into, and patches for the sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from weightwire.layout import ParamMeta
from weightwire.sink import Patch
from weightwire_sparse.changes import Changes
from weightwire_sparse.pieces import AddressSpace, Integers


class Memory:
    """Memory that payloads are received into, kept from one round to the next, since new memory is slow.

    Args:
        device: Where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, Tensor] = {}
        self._addresses: dict[int, Integers] = {}

    def addresses_of(self, rank: int, count: int) -> Integers:
        """Memory for so many addresses of what trainer rank `rank` sends; the next call takes it back."""
        kept = self._addresses.get(rank)
        if kept is None or len(kept) < count:
            kept = self._addresses[rank] = np.empty(count + count // 4, np.int64)
        return kept[:count]

    def of(self, rank: int, sizes: Sequence[int]) -> list[Tensor]:
        """A 1-D uint8 tensor of each size, for what trainer rank `rank` sends; the next call takes them back.

        The first is kept. The others, which hold whole pieces until the round commits, are new: they are rare.
        """
        first, *others = sizes
        kept = self._kept.get(rank)
        if kept is None or len(kept) < first:
            kept = self._kept[rank] = torch.empty(first + first // 4, dtype=torch.uint8, device=self._device)
        return [kept[:first], *(torch.empty(size, dtype=torch.uint8, device=self._device) for size in others)]


def patches_of(
    changes: Changes, whole: Mapping[int, Tensor], space: AddressSpace, metadata: Sequence[ParamMeta]
) -> list[Patch]:
    """The changes of one sender as patches of parameters.

    Args:
        changes: Their addresses are overwritten.
        whole: Bytes of the pieces that came whole, by number.
        space: Of the sender.
        metadata: The parameters.
    """
    patches = []
    addresses, values = torch.from_numpy(changes.addresses), torch.from_numpy(changes.values)
    offsets = changes.value_offsets(space).tolist()
    start = 0
    for number, (piece, count) in enumerate(zip(space.pieces, space.counts(changes.addresses).tolist(), strict=True)):
        if count:
            positions = addresses[start : start + count].sub_(int(space.firsts[number]))
            new = values[offsets[number] : offsets[number + 1]].view(piece.dtype)
            patches.append(Patch(metadata[piece.place].name, positions, new, box=piece.box, ascending=True))
        start += count
    for number, data in whole.items():
        piece = space.pieces[number]
        patches.append(Patch(metadata[piece.place].name, None, data.view(piece.dtype), box=piece.box))
    return patches
