"""The trainer's side: every parameter goes from its first owner to all workers.

What is small is copied into a ring of reusable buffers and travels packed, since a message costs about 0.2 ms; what is
large travels from its own storage in pieces, several in flight. Memory beyond the model is the ring.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from weightwire.collective import TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta
from weightwire.packing import BufferRing, Chunk, Slot, fill_chunk, plan_chunks, plan_digest
from weightwire.report import ProgressEvent
from weightwire.source import as_bytes
from weightwire.trainer import TrainerWeightTransferEngine
from weightwire_nccl.checksum import ChunkChecksums
from weightwire_nccl.messages import NCCLTrainerInitInfo


class NCCLTrainerWeightTransferEngine(TrainerWeightTransferEngine[NCCLTrainerInitInfo]):
    """Sends dense weights to every worker."""

    init_info_cls = NCCLTrainerInitInfo
    consumes = "full"

    _communicator: TorchCommunicator | None = None
    _ring: BufferRing | None = None
    _chunks: list[Chunk] | None = None

    def worker_init_info(self) -> dict[str, Any]:
        """The reference's fields."""
        assert self.rendezvous is not None
        info = self.init_info
        return {
            "master_address": info.master_address,
            "master_port": self.rendezvous.port,
            "rank_offset": self.fleet.rank_offset,
            "world_size": self.fleet.world_size,
            "packed": info.packed,
            "packed_buffer_size_bytes": info.packed_buffer_size_bytes,
            "packed_num_buffers": info.packed_num_buffers,
        }

    def link_options(self) -> dict[str, Any]:
        """How to send, and how long to wait for a peer that does not move."""
        return {"collective": self.init_info.collective, "stall_limit": self.init_info.stall_limit}

    def _plan(self) -> list[Chunk]:
        if self._chunks is None:
            info = self.init_info
            self._chunks = plan_chunks(self.metadata, buffer_bytes=info.packed_buffer_size_bytes, packed=info.packed)
        return self._chunks

    def plan_digest(self) -> str:
        """Digest of the chunks that metadata and buffer size lead to."""
        return plan_digest(self._plan())

    @property
    def path(self) -> str:
        """The way the bytes take, for the report."""
        kind = "NCCL" if self._device().type == "cuda" else "gloo"
        way = "broadcast" if self.init_info.collective else "point to point"
        return f"{kind} {way}, {len(self.fleet.senders)} sending to {self.fleet.workers}"

    def _device(self) -> torch.device:
        device = getattr(self.source, "device", None)
        return device if isinstance(device, torch.device) else torch.device("cpu")

    def connect(self, deadline: Deadline) -> None:
        """Join the group of senders and workers; a rank that sends nothing stays out of it."""
        if self.rank not in self.fleet.senders:
            return
        assert self.rendezvous is not None
        info = self.init_info
        self._communicator = TorchCommunicator(
            self.rendezvous.store(f"nccl-{self._epoch}", deadline),
            rank=self.fleet.senders.index(self.rank),
            world_size=self.fleet.world_size,
            labels=self.fleet.labels(),
            device=self._device(),
            deadline=deadline,
            hostname=self.rendezvous.local_address,
            stall_limit=info.stall_limit,
            piece_bytes=info.packed_buffer_size_bytes,
            window=info.packed_num_buffers,
            collective=info.collective,
            senders=range(len(self.fleet.senders)),
        )
        self._ring = BufferRing(info.packed_num_buffers, info.packed_buffer_size_bytes, device=self._device())

    def transmit(self, number: int, deadline: Deadline) -> int:
        """Send what this rank owns first; iterate the rest so that gathers line up."""
        sending = _Sending(self, deadline)
        sending.run()
        if self.init_info.checksum:
            assert self.rendezvous is not None
            self.rendezvous.exchange(
                f"checksum-{number}", deadline=deadline, payload=sending.checksums.values, gather=True
            ).raise_failed()
        return sending.sent

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Leave the group; one that failed is parked until its threads have ended."""
        communicator, self._communicator = self._communicator, None
        ring, self._ring = self._ring, None
        if communicator is None:
            return
        if error is not None or communicator.failed:
            communicator.retire([ring, self.source])
        else:
            communicator.close(Deadline(5.0, what="the group to close"))


@dataclass(slots=True)
class _Ready:
    """A chunk that is complete: its bytes, and what has to live, or to be given back, once they have moved."""

    data: torch.Tensor
    keep: object = None
    slot: Slot | None = None


class _Sending:
    """One walk over this rank's parameters."""

    def __init__(self, engine: NCCLTrainerWeightTransferEngine, deadline: Deadline) -> None:
        self._engine = engine
        self._deadline = deadline
        self._to = list(engine.fleet.receivers)
        self._mine = {
            item.index: (place, chunk, item)
            for place, chunk in enumerate(engine._plan())
            if chunk.sender == engine.rank
            for item in chunk.items
        }
        self._total = sum(item.nbytes for _, _, item in self._mine.values())
        self._due = deque(sorted({place for place, _, _ in self._mine.values()}))
        self._filling: dict[int, dict[int, torch.Tensor]] = {}
        self._ready: dict[int, _Ready] = {}
        self.sent = 0
        self.checksums = ChunkChecksums(enabled=engine.init_info.checksum)

    def run(self) -> None:
        engine = self._engine
        places = {meta.name: index for index, meta in enumerate(engine.metadata)}
        if engine._communicator is not None:
            engine._communicator.begin_round()
        for done, (meta, tensor) in enumerate(engine.pairs()):
            index = places[meta.name]
            if index in self._mine:
                self._take(index, tensor)
            if engine.on_progress is not None:
                engine.on_progress(self._progress(meta, done + 1))
        assert not self._due, "every chunk of the plan is complete when the source ends"
        if engine._communicator is not None:
            engine._communicator.flush(self._deadline)

    def _take(self, index: int, tensor: torch.Tensor) -> None:
        """Add a parameter to its chunk, and send what is due: chunks go in the order of the plan."""
        place, chunk, item = self._mine[index]
        self.sent += item.nbytes
        if chunk.packed:
            parts = self._filling.setdefault(place, {})
            parts[index] = tensor
            if item is not chunk.items[-1]:
                return
            assert self._engine._ring is not None
            slot = self._engine._ring.acquire(self._deadline)
            self._ready[place] = _Ready(fill_chunk(slot.buffer, chunk, self._filling.pop(place)), slot=slot)
        else:
            self._ready[place] = _Ready(as_bytes(tensor), keep=tensor)
        while self._due and self._due[0] in self._ready:
            place = self._due.popleft()
            self._hand_over(place, self._ready.pop(place))

    def _hand_over(self, place: int, ready: _Ready) -> None:
        communicator = self._engine._communicator
        assert communicator is not None
        self.checksums.add(place, ready.data)
        handle = communicator.send(ready.data, self._to, deadline=self._deadline, keep=ready.keep)
        if ready.slot is not None:
            ready.slot.release(after=handle)

    def _progress(self, meta: ParamMeta, done: int) -> ProgressEvent:
        return ProgressEvent(
            phase="transfer",
            parameter=meta.name,
            parameters_done=done,
            parameters=len(self._engine.metadata),
            bytes_done=self.sent,
            bytes=self._total,
        )
