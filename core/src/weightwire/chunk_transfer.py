"""Moving the chunks of a plan: what is small through a ring of reusable buffers, what is large from its own storage.

Both sides walk through the same plan, so nothing but bytes travels. Memory beyond the tensors is the ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from weightwire.checksums import Checksums
from weightwire.collective import Communicator, Handle
from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta
from weightwire.packing import BufferRing, Chunk, Slot, fill_chunk, unpack_chunk
from weightwire.source import as_bytes


class ChunkShare:
    """What one sender sends of a plan.

    Args:
        plan: All chunks.
        sender: The trainer rank.

    Attributes:
        chunks: Its own, with their places in the plan.
        mine: The places of their tensors in the metadata.
        nbytes: Bytes of the tensors in each chunk, by its place in the plan.
        total: Bytes of all of them.
    """

    def __init__(self, plan: Sequence[Chunk], sender: int) -> None:
        self.chunks = [(place, chunk) for place, chunk in enumerate(plan) if chunk.sender == sender]
        self.mine = {item.index for _, chunk in self.chunks for item in chunk.items}
        self.nbytes = {place: sum(item.nbytes for item in chunk.items) for place, chunk in self.chunks}
        self.total = sum(self.nbytes.values())


class ChunkSender:
    """One walk over a sender's tensors.

    Args:
        share: What it sends.
        communicator: The way; None for a rank that sends nothing.
        ring: What small tensors are packed in.
        to: Data-plane ranks of the receivers.
        deadline: Deadline of the public call.
        checksums: Notes what is sent, by the place of the chunk.
        tell: Called after each chunk with the last tensor's place in the metadata, and the bytes sent so far.

    Attributes:
        sent: Bytes sent so far.
    """

    def __init__(
        self,
        share: ChunkShare,
        communicator: Communicator | None,
        ring: BufferRing | None,
        to: Sequence[int],
        *,
        deadline: Deadline,
        checksums: Checksums,
        tell: Callable[[int, int], object],
    ) -> None:
        self._share = share
        self._communicator = communicator
        self._ring = ring
        self._to = to
        self._deadline = deadline
        self._checksums = checksums
        self._tell = tell
        self._due = deque(share.chunks)
        self._here: dict[int, Tensor] = {}
        self.sent = 0
        if communicator is not None:
            communicator.begin_round()

    def give(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Take tensors, in ascending places of the metadata, and send what is complete now."""
        mine = map(self._share.mine.__contains__, places)
        self._here.update(compress(zip(places, tensors, strict=True), mine))
        # Chunks go in the order of the plan, which is that of their last parameters.
        while self._due and self._due[0][1].items[-1].index <= places[-1]:
            self._send(*self._due.popleft())

    def finish(self) -> None:
        """Wait until everything has left."""
        assert not self._due, "every chunk of the plan is complete when the source ends"
        if self._communicator is not None:
            self._communicator.flush(self._deadline)

    def _send(self, place: int, chunk: Chunk) -> None:
        slot = None
        assert self._communicator is not None and self._ring is not None
        indices = [item.index for item in chunk.items]
        parts = dict(zip(indices, map(self._here.pop, indices), strict=True))
        if chunk.packed:
            slot = self._ring.acquire(self._deadline)
            buffers = [fill_chunk(slot.buffer, chunk, parts)]
        else:
            buffers = [as_bytes(part) for part in parts.values()]
        self._checksums.add(place, buffers)
        handle = self._communicator.send(buffers, self._to, deadline=self._deadline)
        if slot is not None:
            slot.release(after=handle)
        self.sent += self._share.nbytes[place]
        self._tell(indices[-1], self.sent)


@dataclass(slots=True)
class _Arriving:
    """A chunk on its way: where it lands, and what has to be done once it is here."""

    place: int
    handle: Handle
    buffers: list[Tensor]
    slot: Slot | None = None
    tensors: list[Tensor] = field(default_factory=list)


class ChunkReceiver:
    """The chunks of one round, received in the order of the plan with several on their way.

    Args:
        plan: All chunks.
        metadata: What it was made from.
        communicator: The way.
        ring: What packed chunks arrive in.
        senders: Data-plane rank of each sending trainer rank.
        targets: Where tensors land, by name: contiguous, of full shape. Those that lack one are given to `load`.
        received: Told the names of tensors that are in their targets.
        load: Given names and tensors that are gone when it returns.
        loose_bytes: How much memory large tensors without a target may take at a time; one by itself may be more.
        deadline: Deadline of the public call.
        device: Where the tensors are.
        checksums: Notes what came, by the place of the chunk.
    """

    def __init__(
        self,
        plan: Sequence[Chunk],
        metadata: Sequence[ParamMeta],
        communicator: Communicator,
        ring: BufferRing,
        *,
        senders: Mapping[int, int],
        targets: Mapping[str, Tensor],
        received: Callable[[list[str]], object],
        load: Callable[[Iterable[tuple[str, Tensor]]], object],
        loose_bytes: int,
        deadline: Deadline,
        device: torch.device,
        checksums: Checksums,
    ) -> None:
        self._plan = plan
        self._metadata = metadata
        self._communicator = communicator
        self._ring = ring
        self._senders = senders
        self._targets = targets
        self._received = received
        self._load = load
        self._loose_limit = loose_bytes
        self._deadline = deadline
        self._device = device
        self._checksums = checksums
        self._arriving: deque[_Arriving] = deque()
        self._loose_bytes = 0

    def run(self) -> None:
        """Receive everything.

        Raises:
            PeerLost: A sender died or stopped.
            UpdateRefused: From `received` or `load`.
        """
        self._communicator.begin_round()
        for place, chunk in enumerate(self._plan):
            self._post(place, chunk)
        while self._arriving:
            self._take()

    def _post(self, place: int, chunk: Chunk) -> None:
        slot, tensors = None, []
        if chunk.packed:
            while (slot := self._ring.try_acquire()) is None:
                self._take()
            buffers = [slot.buffer[: chunk.nbytes]]
        else:
            tensors = self._landings([self._metadata[item.index] for item in chunk.items])
            buffers = [as_bytes(tensor) for tensor in tensors]
        handle = self._communicator.receive(buffers, self._senders[chunk.sender], deadline=self._deadline)
        self._arriving.append(_Arriving(place, handle, buffers, slot, tensors))

    def _landings(self, metas: Sequence[ParamMeta]) -> list[Tensor]:
        """Where large parameters land: their targets, or memory of their own."""
        loose = self._loose(metas)
        while self._arriving and loose and self._loose_bytes + loose > self._loose_limit:
            self._take()
        self._loose_bytes += loose
        return [
            target
            if (target := self._targets.get(meta.name)) is not None
            else torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
            for meta in metas
        ]

    def _loose(self, metas: Sequence[ParamMeta]) -> int:
        return sum(meta.nbytes for meta in metas if meta.name not in self._targets)

    def _take(self) -> None:
        """Wait for the oldest chunk and hand it on."""
        arrived = self._arriving.popleft()
        arrived.handle.wait(self._deadline)
        self._checksums.add(arrived.place, arrived.buffers)
        chunk = self._plan[arrived.place]
        if arrived.slot is not None:
            copied, views = unpack_chunk(arrived.buffers[0], chunk, self._metadata, self._targets)
            if copied:
                self._received(copied)
            self._load(views)
            arrived.slot.release()
            return
        metas = [self._metadata[item.index] for item in chunk.items]
        if direct := [meta.name for meta in metas if meta.name in self._targets]:
            self._received(direct)
        loose = [
            (meta.name, tensor)
            for meta, tensor in zip(metas, arrived.tensors, strict=True)
            if meta.name not in self._targets
        ]
        if loose:
            self._load(loose)
            self._loose_bytes -= self._loose(metas)
