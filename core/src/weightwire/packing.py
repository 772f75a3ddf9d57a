"""What travels together: the chunk plan, and the ring of buffers that small tensors are packed into.

A tensor of many bytes goes from its own storage into its target without a copy, as a chunk of its own. Small ones
cost more as messages of their own than as copies (20,000 tensors of 1 KiB: 4.7 s against 6 ms), so those of one
sender are packed, each at an aligned offset, so that the receiver can use them where they lie.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta

ALIGNMENT = 64
"""Bytes at which every ring buffer, and by default every packed tensor, starts."""

_PACK_BELOW = 1 << 20


@dataclass(frozen=True, slots=True)
class ChunkItem:
    """A parameter in a chunk.

    Attributes:
        index: Its place in the metadata.
        offset: Where its bytes start in the chunk.
        nbytes: How many they are.
    """

    index: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What goes as one message.

    Attributes:
        sender: Trainer rank that sends it.
        packed: Whether it goes through a ring buffer; else it is one tensor, sent from its own storage.
        items: Its parameters, in metadata order.
        runs: Ranges of `items` of one dtype and shape that lie end to end, and so are copied and viewed by one call.
        nbytes: Length of the message.
    """

    sender: int
    packed: bool
    items: tuple[ChunkItem, ...]
    runs: tuple[tuple[int, int], ...]
    nbytes: int


def plan_chunks(
    metadata: Sequence[ParamMeta],
    *,
    buffer_bytes: int,
    packed: bool = True,
    pack_below: int | None = None,
    align: int = ALIGNMENT,
) -> list[Chunk]:
    """Cut metadata into chunks; a pure function, so every rank has the same.

    Chunks come in the order of their last parameter, so a sender that goes through its parameters once can send each
    as soon as it is complete. A pack takes its sender's small tensors as they come, until the next does not fit.

    Args:
        metadata: All parameters; each is sent by its first owner.
        buffer_bytes: Size of a ring buffer; no pack is longer.
        packed: False makes every parameter a chunk of its own.
        pack_below: Parameters of fewer bytes are packed; None: the smaller of `buffer_bytes` and 1 MiB.
        align: Offsets in a pack are multiples of this, a power of two.

    Raises:
        ValueError: Numbers that do not fit.
    """
    limit = min(buffer_bytes, _PACK_BELOW) if pack_below is None else pack_below
    if buffer_bytes < 1 or not 0 <= limit <= buffer_bytes:
        raise ValueError(f"buffer_bytes is {buffer_bytes} and pack_below {limit}: 0 <= pack_below <= buffer_bytes")
    if align < 1 or align & (align - 1):
        raise ValueError(f"align is {align}, not a power of two")
    chunks: list[Chunk] = []
    growing: dict[int, list[ChunkItem]] = {}
    for index, meta in enumerate(metadata):
        sender, nbytes = meta.first_owner, meta.nbytes
        if not packed or nbytes >= limit:
            chunks.append(Chunk(sender, False, (ChunkItem(index, 0, nbytes),), ((0, 1),), nbytes))
            continue
        items = growing.get(sender, [])
        offset = _aligned(items[-1].offset + items[-1].nbytes, align) if items else 0
        if offset + nbytes > buffer_bytes:
            chunks.append(_pack(sender, growing.pop(sender), metadata))
            offset = 0
        growing.setdefault(sender, []).append(ChunkItem(index, offset, nbytes))
    chunks += [_pack(sender, items, metadata) for sender, items in growing.items()]
    return sorted(chunks, key=lambda chunk: chunk.items[-1].index)


def _aligned(offset: int, align: int) -> int:
    return (offset + align - 1) & -align


def _pack(sender: int, items: list[ChunkItem], metadata: Sequence[ParamMeta]) -> Chunk:
    starts = [0]
    for place, (last, item) in enumerate(itertools.pairwise(items), start=1):
        one, other = metadata[last.index], metadata[item.index]
        if last.offset + last.nbytes != item.offset or one.dtype != other.dtype or one.shape != other.shape:
            starts.append(place)
    runs = tuple(itertools.pairwise([*starts, len(items)]))
    return Chunk(sender, True, tuple(items), runs, items[-1].offset + items[-1].nbytes)


def plan_digest(chunks: Iterable[Chunk]) -> str:
    """SHA-256 in hex of a chunk plan; sender and receiver compare it before any byte moves."""
    plan = [
        [chunk.sender, chunk.packed, chunk.nbytes, [[item.index, item.offset, item.nbytes] for item in chunk.items]]
        for chunk in chunks
    ]
    return hashlib.sha256(json.dumps(plan, separators=(",", ":")).encode()).hexdigest()


def fill_chunk(buffer: Tensor, chunk: Chunk, tensors: Mapping[int, Tensor]) -> Tensor:
    """Copy a chunk's tensors to their places.

    Args:
        buffer: 1-D uint8, at least as long as the chunk, aligned as the plan is.
        chunk: A chunk.
        tensors: Detached tensors by place in the metadata.

    Returns:
        The part of `buffer` to send.
    """
    for items in _runs(chunk):
        parts = [tensors[item.index] for item in items]
        torch.stack(parts, out=_stacked(buffer, items, parts[0].dtype, parts[0].shape))
    return buffer[: chunk.nbytes]


def chunk_views(buffer: Tensor, chunk: Chunk, metadata: Sequence[ParamMeta]) -> list[tuple[str, Tensor]]:
    """Names and tensors of a received chunk, as views of `buffer`: gone when the buffer is used again.

    Args:
        buffer: As in `fill_chunk`.
        chunk: A chunk.
        metadata: What it was planned from.
    """
    views: list[tuple[str, Tensor]] = []
    for items in _runs(chunk):
        metas = [metadata[item.index] for item in items]
        tensors = _stacked(buffer, items, metas[0].dtype, metas[0].shape).unbind(0)
        views += zip([meta.name for meta in metas], tensors, strict=True)
    return views


def _runs(chunk: Chunk) -> Iterator[tuple[ChunkItem, ...]]:
    return (chunk.items[first:end] for first, end in chunk.runs)


def _stacked(buffer: Tensor, items: tuple[ChunkItem, ...], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    part = buffer[items[0].offset : items[-1].offset + items[-1].nbytes]
    return part.view(dtype).view(len(items), *shape)


class Pending(Protocol):
    """Bytes on their way, such as a `Handle` of a communicator."""

    @property
    def done(self) -> bool:
        """Whether the buffer may be used again."""

    def wait(self, deadline: Deadline) -> None:
        """Wait until it is."""


@dataclass(slots=True, eq=False)
class Slot:
    """A buffer of a `BufferRing`, on loan.

    Attributes:
        buffer: 1-D uint8 tensor of the ring's length.
    """

    buffer: Tensor
    _ring: BufferRing = field(repr=False)

    def release(self, after: Pending | None = None) -> None:
        """Give the buffer back, once: now, or when `after` is done."""
        self._ring._give_back(self, after)


class BufferRing:
    """A fixed number of aligned buffers that are used over and over; memory is bounded whatever the model.

    Args:
        count: How many there are.
        nbytes: Length of each.
        device: Where they are; each is allocated when it is first needed.

    Raises:
        ValueError: `count` or `nbytes` is not positive.
    """

    def __init__(self, count: int, nbytes: int, device: torch.device | str) -> None:
        if count < 1 or nbytes < 1:
            raise ValueError(f"a ring of {count} buffers of {nbytes} bytes")
        self._count = count
        self._nbytes = nbytes
        self._device = torch.device(device)
        self._condition = threading.Condition()
        self._allocated = 0
        self._free: deque[Tensor] = deque()
        self._leaving: deque[tuple[Tensor, Pending]] = deque()
        self._lent: set[Slot] = set()

    def acquire(self, deadline: Deadline) -> Slot:
        """Borrow a buffer; its content is undefined.

        Raises:
            DeadlineExceeded: None came back in time.
            BaseException: What the `Pending` that held a buffer raised.
        """
        while (slot := self.try_acquire()) is None:
            with self._condition:
                deadline.wait_for(self._promising, self._condition, "a free buffer")
                pending = self._leaving[0][1] if self._leaving else None
            if pending is not None:
                pending.wait(deadline)
        return slot

    def try_acquire(self) -> Slot | None:
        """Borrow a buffer if one is free now."""
        with self._condition:
            while self._leaving and self._leaving[0][1].done:
                self._free.append(self._leaving.popleft()[0])
            if not self._free and self._allocated == self._count:
                return None
            slot = Slot(self._free.popleft() if self._free else self._allocate(), self)
            self._lent.add(slot)
            return slot

    def retire(self) -> None:
        """Forget every buffer, on loan or not: a failed transfer may still write to it. New ones take their place."""
        with self._condition:
            self._allocated = 0
            self._lent.clear()
            self._free.clear()
            self._leaving.clear()
            self._condition.notify_all()

    @property
    def nbytes(self) -> int:
        """Memory of all buffers together, in bytes, once they have been needed."""
        return self._count * self._nbytes

    @property
    def allocated_bytes(self) -> int:
        """Memory held now, in bytes."""
        return self._allocated * self._nbytes

    def _promising(self) -> bool:
        return bool(self._free or self._leaving) or self._allocated < self._count

    def _allocate(self) -> Tensor:
        self._allocated += 1
        memory = torch.empty(self._nbytes + ALIGNMENT, dtype=torch.uint8, device=self._device)
        skip = -memory.data_ptr() % ALIGNMENT
        return memory[skip : skip + self._nbytes]

    def _give_back(self, slot: Slot, after: Pending | None) -> None:
        with self._condition:
            if slot in self._lent:
                self._lent.remove(slot)
                if after is None:
                    self._free.append(slot.buffer)
                else:
                    self._leaving.append((slot.buffer, after))
                self._condition.notify_all()
