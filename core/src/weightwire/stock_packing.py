"""The packed format of vLLM's dense transfer: bytes end to end, without padding, cut by a rule both sides know.

The rule (vLLM 0.32 and 0.33): tensors are added until the bytes are more than the limit, the tensor that crossed it
included. So a pack may be longer than the limit by its last tensor, and one that meets it exactly is not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from weightwire.layout import ParamMeta
from weightwire.source import as_bytes


def cut_packs(sizes: Iterable[int], limit: int) -> list[list[int]]:
    """Cut tensors of these sizes in bytes into packs; returns the places of each pack's tensors.

    Args:
        sizes: In bytes, in order.
        limit: A pack is cut when it is longer than this.

    Raises:
        ValueError: A negative number.
    """
    cut = _Cut(limit)
    packs: list[list[int]] = [[]]
    for place, size in enumerate(sizes):
        packs[-1].append(place)
        if cut.after(size):
            packs.append([])
    return packs if packs[-1] else packs[:-1]


class _Cut:
    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"packs of at most {limit} bytes")
        self._limit = limit
        self._bytes = 0

    def after(self, size: int) -> bool:
        if size < 0:
            raise ValueError(f"a tensor of {size} bytes")
        self._bytes += size
        if self._bytes <= self._limit:
            return False
        self._bytes = 0
        return True


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of `tensors` end to end, as a new 1-D uint8 tensor on their device."""
    parts = [as_bytes(tensor.contiguous()) for tensor in tensors]
    device = parts[0].device if parts else None
    packed = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8, device=device)
    offset = 0
    for part in parts:
        packed[offset : offset + part.numel()].copy_(part)
        offset += part.numel()
    return packed


def unpack(buffer: Tensor, metadata: Sequence[ParamMeta]) -> list[tuple[str, Tensor]]:
    """The tensors of a pack. What lies aligned for its dtype is a view of `buffer`, the rest is copied out.

    Raises:
        ValueError: The pack is not as long as `metadata` says.
    """
    expected = sum(meta.nbytes for meta in metadata)
    if buffer.numel() != expected:
        raise ValueError(f"a pack of {buffer.numel()} bytes where its {len(metadata)} parameters have {expected}")
    tensors, offset = [], 0
    for meta in metadata:
        part = buffer[offset : offset + meta.nbytes]
        # Both count: torch looks at the offset in the storage, the processor at the address.
        if part.storage_offset() % meta.dtype.itemsize or part.data_ptr() % meta.dtype.itemsize:
            part = part.clone()
        tensors.append((meta.name, part.view(meta.dtype).view(meta.shape)))
        offset += meta.nbytes
    return tensors


def packed_broadcast_producer(
    pairs: Iterable[tuple[str, Tensor]], broadcast: Callable[[Tensor], None], *, buffer_size_bytes: int
) -> None:
    """Send tensors in packs; the sending side of `packed_broadcast_consumer`, one pack in memory at a time.

    Args:
        pairs: Name and tensor of each parameter, in metadata order.
        broadcast: Sends a 1-D uint8 tensor; done with it when it returns.
        buffer_size_bytes: The limit of the cut rule.
    """
    cut = _Cut(buffer_size_bytes)
    tensors: list[Tensor] = []
    for _, tensor in pairs:
        tensors.append(tensor)
        if cut.after(tensor.numel() * tensor.element_size()):
            broadcast(pack(tensors))
            tensors.clear()
    if tensors:
        broadcast(pack(tensors))


def packed_broadcast_consumer(
    metadata: Sequence[ParamMeta],
    broadcast: Callable[[Tensor], None],
    load: Callable[[list[tuple[str, Tensor]]], object],
    *,
    buffer_size_bytes: int,
    device: torch.device | str = "cpu",
) -> None:
    """Receive tensors in packs and load each pack with one call.

    Every pack has memory of its own, since a loader may keep the tensors it was given.

    Args:
        metadata: All parameters, in the order they are sent.
        broadcast: Receives into a 1-D uint8 tensor; it is filled when this returns.
        load: Takes name and tensor of each parameter of a pack.
        buffer_size_bytes: The sender's limit of the cut rule.
        device: Where the packs are received.
    """
    for places in cut_packs([meta.nbytes for meta in metadata], buffer_size_bytes):
        metas = [metadata[place] for place in places]
        buffer = torch.empty(sum(meta.nbytes for meta in metas), dtype=torch.uint8, device=device)
        broadcast(buffer)
        load(unpack(buffer, metas))
