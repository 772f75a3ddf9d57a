"""Which bytes travel together: the chunk plan, and a ring of buffers to pack small parameters in.

A message costs about 0.2 ms whatever its size, so thousands of small parameters must travel together; a copy into a
buffer costs more than it saves for a large one, so that travels from and into its own storage. Sender and receiver
derive the same plan from metadata.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta

PACK_BELOW = 1 << 20
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ChunkItem:
    """One parameter in a chunk.

    Attributes:
        index: Its place in the metadata.
        offset: First byte in the chunk.
        nbytes: Its size in bytes.
    """

    index: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message.

    Attributes:
        sender: Trainer rank that sends it.
        packed: Whether its parameters are copied into a buffer; else it is one parameter's own storage.
        items: Its parameters, in metadata order.
        nbytes: Size in bytes, gaps for alignment included.
    """

    sender: int
    packed: bool
    items: tuple[ChunkItem, ...]
    nbytes: int


def plan_chunks(
    metadata: Sequence[ParamMeta],
    *,
    buffer_bytes: int,
    packed: bool = True,
    pack_below: int | None = None,
    align: int = ALIGNMENT,
) -> list[Chunk]:
    """Cut a round into chunks, in the one order in which every rank walks them.

    That order is the order in which a walk over the metadata completes them: by the place of their last parameter.
    A pack takes the small parameters of its sender as they come, until the next one does not fit.

    Args:
        metadata: Every parameter.
        buffer_bytes: Largest pack in bytes.
        packed: Pack at all.
        pack_below: Parameters of fewer bytes are packed; by default the smaller of 1 MiB and a buffer.
        align: Offsets in a pack are multiples of this.
    """
    limit = min(PACK_BELOW, buffer_bytes) if pack_below is None else min(pack_below, buffer_bytes)
    chunks: list[Chunk] = []
    filling: dict[int, list[ChunkItem]] = {}

    def flush(sender: int) -> None:
        items = filling.pop(sender, None)
        if items:
            chunks.append(Chunk(sender, True, tuple(items), items[-1].offset + items[-1].nbytes))

    for index, meta in enumerate(metadata):
        sender = meta.first_owner
        if not packed or meta.nbytes >= limit > 0:
            chunks.append(Chunk(sender, False, (ChunkItem(index, 0, meta.nbytes),), meta.nbytes))
            continue
        items = filling.get(sender, [])
        offset = -(-(items[-1].offset + items[-1].nbytes) // align) * align if items else 0
        if offset + meta.nbytes > buffer_bytes:
            flush(sender)
            offset = 0
        filling.setdefault(sender, []).append(ChunkItem(index, offset, meta.nbytes))
    for sender in sorted(filling):
        flush(sender)
    return sorted(chunks, key=lambda chunk: chunk.items[-1].index)


def plan_digest(chunks: Sequence[Chunk]) -> str:
    """SHA-256 in hex of a plan."""
    rows = [
        [chunk.sender, chunk.packed, chunk.nbytes, [[item.index, item.offset] for item in chunk.items]]
        for chunk in chunks
    ]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


class Completion(Protocol):
    """Something under way, such as a `Handle`."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    def wait(self, deadline: Deadline) -> None:
        """Wait until it has."""


class Slot:
    """One buffer of a ring, held until `release`, or until what it was handed to is done."""

    __slots__ = ("_ring", "buffer", "until")

    def __init__(self, ring: BufferRing, buffer: Tensor) -> None:
        self._ring = ring
        self.buffer = buffer
        self.until: Completion | None = None

    def release(self) -> None:
        """Give the buffer back."""
        self._ring.give_back(self)

    def release_after(self, completion: Completion) -> None:
        """Give the buffer back once `completion` is done."""
        self.until = completion
        self._ring.give_back(self)


class BufferRing:
    """`count` buffers of `nbytes` each, allocated on first use and used in turn.

    Args:
        count: Number of buffers.
        nbytes: Size of each in bytes.
        device: Where they live.
    """

    def __init__(self, count: int, nbytes: int, device: torch.device | str = "cpu") -> None:
        self.count = count
        self.nbytes = nbytes
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._made = 0
        self._free: list[Slot] = []

    def try_acquire(self) -> Slot | None:
        """A free buffer, or None where all are in use."""
        with self._lock:
            for place, slot in enumerate(self._free):
                if slot.until is None or slot.until.done:
                    slot.until = None
                    return self._free.pop(place)
            if self._made == self.count:
                return None
            self._made += 1
        return Slot(self, self._allocate())

    def acquire(self, deadline: Deadline) -> Slot:
        """A free buffer; waits for the oldest one that was handed to somebody.

        Raises:
            DeadlineExceeded: None became free.
        """
        while (slot := self.try_acquire()) is None:
            with self._lock:
                waiting = [one.until for one in self._free if one.until is not None]
            assert waiting, "every buffer of the ring is held by its own user"
            waiting[0].wait(deadline)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Take a buffer back; called by its slot."""
        with self._lock:
            self._free.append(slot)

    def _allocate(self) -> Tensor:
        raw = torch.empty(self.nbytes + ALIGNMENT, dtype=torch.uint8, device=self._device)
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + self.nbytes]
