"""What travels together: the chunk plan, and the ring of buffers that small tensors are packed into.

A tensor of many bytes goes from its own storage into its target without a copy, and a few of them share a message.
Small ones cost more by themselves than as copies (20,000 tensors of 1 KiB: 4.7 s against 6 ms), so those of one
sender are packed, each at an aligned offset, so that the receiver can use them where they lie.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import operator
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

_INDEX = operator.attrgetter("index")
_PACK_BELOW = 1 << 20
_PACK_BYTES = 4 << 20
_DIRECT_BUFFERS = 2
_SPAN_TARGETS = 8


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
        packed: Whether it goes through a ring buffer; else each tensor is sent from its own storage.
        items: Its parameters, in metadata order.
        runs: Ranges of `items` of one dtype and shape that lie end to end, and so are copied and viewed by one call.
        nbytes: Length of the message.
        names: Of its parameters.
    """

    sender: int
    packed: bool
    items: tuple[ChunkItem, ...]
    runs: tuple[tuple[int, int], ...]
    nbytes: int
    names: tuple[str, ...] = field(default=(), compare=False, repr=False)


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
    as soon as it is complete. A chunk takes its sender's small, or its large, tensors as they come, until the next
    does not fit: a pack is at most one buffer long, and at most 4 MiB, so that packing one, sending another and
    unpacking a third go on side by side; large tensors are together at most two buffers (one by itself may be more).

    Args:
        metadata: All parameters; each is sent by its first owner.
        buffer_bytes: Size of a ring buffer; no pack is longer.
        packed: False copies nothing into packs.
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
    growing: dict[tuple[int, bool], list[ChunkItem]] = {}
    for index, meta in enumerate(metadata):
        pack = packed and meta.nbytes < limit
        kind = meta.first_owner, pack
        items = growing.get(kind, [])
        end = items[-1].offset + items[-1].nbytes if items else 0
        offset = _aligned(end, align) if pack else end
        longest = min(buffer_bytes, _PACK_BYTES) if pack else _DIRECT_BUFFERS * buffer_bytes
        if items and offset + meta.nbytes > longest:
            chunks.append(_chunk(*kind, growing.pop(kind), metadata))
            offset = 0
        growing.setdefault(kind, []).append(ChunkItem(index, offset, meta.nbytes))
    chunks += [_chunk(*kind, items, metadata) for kind, items in growing.items()]
    return sorted(chunks, key=lambda chunk: chunk.items[-1].index)


def _aligned(offset: int, align: int) -> int:
    return (offset + align - 1) & -align


def _chunk(sender: int, packed: bool, items: list[ChunkItem], metadata: Sequence[ParamMeta]) -> Chunk:
    names = tuple(metadata[item.index].name for item in items)
    length = items[-1].offset + items[-1].nbytes
    return Chunk(sender, packed, tuple(items), _runs_of(items, metadata), length, names)


def _runs_of(items: list[ChunkItem], metadata: Sequence[ParamMeta]) -> tuple[tuple[int, int], ...]:
    starts = [0]
    for place, (last, item) in enumerate(itertools.pairwise(items), start=1):
        one, other = metadata[last.index], metadata[item.index]
        if last.offset + last.nbytes != item.offset or one.dtype != other.dtype or one.shape != other.shape:
            starts.append(place)
    return tuple(itertools.pairwise([*starts, len(items)]))


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
        parts = list(map(tensors.__getitem__, map(_INDEX, items)))
        torch.stack(parts, out=_stacked(buffer, items, parts[0].dtype, parts[0].shape))
    return buffer[: chunk.nbytes]


def chunk_views(buffer: Tensor, chunk: Chunk, metadata: Sequence[ParamMeta]) -> list[tuple[str, Tensor]]:
    """Names and tensors of a received chunk, as views of `buffer`: gone when the buffer is used again.

    Args:
        buffer: As in `fill_chunk`.
        chunk: A chunk.
        metadata: What it was planned from.
    """
    return unpack_chunk(buffer, chunk, metadata, {})[1]


def unpack_chunk(
    buffer: Tensor, chunk: Chunk, metadata: Sequence[ParamMeta], targets: Mapping[str, Tensor]
) -> tuple[list[str], list[tuple[str, Tensor]]]:
    """Copy what can be copied by the run: parameters whose targets lie end to end in CPU memory.

    Args:
        buffer: As in `chunk_views`.
        chunk: A chunk.
        metadata: What it was planned from.
        targets: Contiguous memory by name, see `WeightSink.targets`.

    Returns:
        The names of what was copied; names and views of the rest, as `chunk_views` gives them.
    """
    copied: list[str] = []
    views: list[tuple[str, Tensor]] = []
    for first, end in chunk.runs:
        items, names = chunk.items[first:end], chunk.names[first:end]
        here = all(map(targets.__contains__, names))
        spans = _spans(list(map(targets.__getitem__, names)), items[0].nbytes) if here else None
        if spans is None:
            views += zip(names, _rows(buffer, items, metadata).unbind(0), strict=True)
            continue
        start = items[0].offset
        for span in spans:
            span.copy_(buffer[start : start + span.numel()])
            start += span.numel()
        copied += names
    return copied, views


def _spans(targets: Sequence[Tensor], nbytes: int) -> list[Tensor] | None:
    """The memory of targets of `nbytes` each in as few parts as it lies in, while they live; None if in many."""
    first = targets[0]
    if len(targets) < _SPAN_TARGETS or not nbytes or first.device.type != "cpu" or first.nbytes != nbytes:
        return None
    places = list(map(Tensor.data_ptr, targets))
    breaks = map(operator.ne, places[1:], map(nbytes.__add__, places))
    starts = [0, *itertools.compress(itertools.count(1), breaks), len(places)]
    if len(starts) > 1 + len(places) // _SPAN_TARGETS:
        return None
    memory = [
        (ctypes.c_uint8 * (nbytes * (end - at))).from_address(places[at]) for at, end in itertools.pairwise(starts)
    ]
    return [torch.frombuffer(part, dtype=torch.uint8) for part in memory]


def _runs(chunk: Chunk) -> Iterator[tuple[ChunkItem, ...]]:
    return (chunk.items[first:end] for first, end in chunk.runs)


def _rows(buffer: Tensor, items: tuple[ChunkItem, ...], metadata: Sequence[ParamMeta]) -> Tensor:
    meta = metadata[items[0].index]
    return _stacked(buffer, items, meta.dtype, meta.shape)


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
            # The one that came back last is the one that the processor's cache knows best.
            slot = Slot(self._free.pop() if self._free else self._allocate(), self)
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
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self._device

    @property
    def length(self) -> int:
        """Bytes of one buffer."""
        return self._nbytes

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
