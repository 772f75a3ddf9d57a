"""The memory that updates of one model are received into, kept from one update to the next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from weightwire import staging
from weightwire.inventory import Entry, Group, Views
from weightwire.module_update import Update


class StagingArea:
    """Hands out a second storage for each group, and buffers for what cannot be received to its place.

    Attributes:
        allocated_bytes: Allocated since the owner last set it to 0.
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._buffers: dict[Entry, torch.Tensor] = {}
        self._slab = staging.Slab()

    def stage(self, update: Update, group: Group) -> Views:
        """The storage that stands in for the live one of `group` in this update."""
        views = update.staged.get(group)
        if views is None:
            views = group.spare or self.new_views(group, partial(_ahead, update))
            staging.poison(views.storage)
            group.spare = update.staged[group] = views
        return views

    def new_views(self, group: Group, ahead: Callable[[], int] = int) -> Views:
        """A fresh storage, seen as the tensors of `group`; `ahead` as in `Slab.cut`."""
        live = group.views().tensors
        # An adopted storage holds others' tensors too: this one alone gets a storage of its own.
        size, offset = (live[0].nbytes, 0) if group.adopted else (group.storage.nbytes(), None)
        storage = self._allocate(size, group.storage.device, ahead)
        return Views(storage, [staging.view_like(tensor, storage, offset=offset) for tensor in live], ours=True)

    def buffer(self, update: Update, name: str, entry: Entry, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Memory for a tensor that is cast, strided or cut on its way."""
        buffer = self._buffers.get(entry)
        if buffer is None or buffer.dtype != dtype or buffer.shape != shape:
            storage = self._allocate(shape.numel() * dtype.itemsize, entry.tensors[0].device)
            empty = torch.empty(0, dtype=dtype, device=storage.device)
            buffer = self._buffers[entry] = empty.set_(storage).view(shape)
        staging.poison(buffer.untyped_storage())
        update.buffers[name] = buffer
        return buffer

    def retire(self, update: Update) -> None:
        """Never hand out again what `update` was given."""
        repeated = update.repeated.rebinds if update.repeated is not None else []
        for group in (*update.staged, *(rebind.group for rebind in repeated)):
            group.spare = None
        for name in update.buffers:
            self._buffers.pop(update.chosen[name][0], None)

    def clear(self) -> None:
        """Forget all buffers; spare storages belong to the groups."""
        self._buffers.clear()

    def _allocate(self, nbytes: int, device: torch.device, ahead: Callable[[], int] = int) -> torch.UntypedStorage:
        self.allocated_bytes += nbytes
        if device.type == "cpu" and nbytes:
            return self._slab.cut(nbytes, ahead)
        return staging.allocate(nbytes, device)


def _ahead(update: Update) -> int:
    """Bytes of a slab that the storages which this update still needs will take."""
    entries = {group: entry for entry, _ in update.chosen.values() if (group := entry.group) is not None}
    lacking = [(group, entry) for group, entry in entries.items() if group.spare is None]
    return staging.slab_bytes(
        entry.tensors[0].nbytes if group.adopted else group.storage.nbytes() for group, entry in lacking
    )
