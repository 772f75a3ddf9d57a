"""The trainer's side: every parameter goes from its first owner to all workers.

What is small is copied into a ring of reusable buffers and travels packed; what is large travels from its own storage
in pieces, several in flight. Memory beyond the model is the ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress
from typing import Any, Self, cast

import torch

from weightwire.checksums import Checksums
from weightwire.clients.protocol import VLLMWeightSyncClient
from weightwire.collective import TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.packing import BufferRing, Chunk, fill_chunk, plan_chunks, plan_digest
from weightwire.report import ProgressEvent
from weightwire.source import WeightSource, as_bytes
from weightwire.trainer import TrainerWeightTransferEngine
from weightwire_nccl.messages import NCCLTrainerInitInfo
from weightwire_nccl.stock import StockNCCLTrainer


class NCCLTrainerWeightTransferEngine(TrainerWeightTransferEngine[NCCLTrainerInitInfo]):
    """Sends dense weights to every worker."""

    init_info_cls = NCCLTrainerInitInfo
    consumes = "full"

    _communicator: TorchCommunicator | None = None
    _ring: BufferRing | None = None
    _chunks: list[Chunk] | None = None
    _share: _Share | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: NCCLTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """See `TrainerWeightTransferEngine.trainer_init`; with `wire="vllm"` an engine that speaks vLLM's."""
        if init_info.wire == "vllm":
            return cast(Self, StockNCCLTrainer.trainer_init(init_info, client=client, source=source))
        return super().trainer_init(init_info, client=client, source=source)

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
            "packed_buffer_size_bytes": info.buffer_bytes,
            "packed_num_buffers": info.buffers,
        }

    def link_options(self) -> dict[str, Any]:
        """How to send, and how long to wait for a peer that does not move."""
        return {"collective": self.init_info.collective, "stall_limit": self.init_info.stall_limit}

    def _plan(self) -> list[Chunk]:
        if self._chunks is None:
            info = self.init_info
            self._chunks = plan_chunks(self.metadata, buffer_bytes=info.buffer_bytes, packed=info.packed)
        return self._chunks

    def _own_share(self) -> _Share:
        if self._share is None:
            self._share = _Share(self._plan(), self.rank)
        return self._share

    def plan_digest(self) -> str:
        """Digest of the chunks that metadata and buffer size lead to."""
        return plan_digest(self._plan())

    @property
    def path(self) -> str:
        """The way the bytes take, for the report."""
        kind = "NCCL" if self._device().type == "cuda" else "gloo"
        way = "broadcast" if self.init_info.collective else "point to point"
        return f"{kind} {way}, {len(self.fleet.senders)} sending to {self.fleet.workers}"

    def connect(self, deadline: Deadline) -> None:
        """Join the group of senders and workers; a rank that sends nothing stays out of it."""
        if self.rank not in self.fleet.senders:
            return
        assert self.rendezvous is not None
        info = self.init_info
        self._communicator = TorchCommunicator(
            self.rendezvous.store(f"nccl-{self.epoch}", deadline),
            rank=self.fleet.senders.index(self.rank),
            world_size=self.fleet.world_size,
            labels=self.fleet.labels(),
            device=self._device(),
            deadline=deadline,
            hostname=self.rendezvous.local_address,
            stall_limit=info.stall_limit,
            piece_bytes=info.buffer_bytes,
            window=info.buffers,
            collective=info.collective,
            senders=range(len(self.fleet.senders)),
        )
        self._ring = BufferRing(info.buffers, info.buffer_bytes, device=self._device())

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
        if communicator is not None:
            communicator.leave([ring, self.source], error=error)


class _Share:
    """What one rank sends.

    Args:
        plan: All chunks.
        rank: The trainer rank.

    Attributes:
        chunks: Its own, with their places in the plan.
        mine: The places of their parameters in the metadata.
        nbytes: Bytes of the parameters in each chunk, by its place in the plan.
    """

    def __init__(self, plan: Sequence[Chunk], rank: int) -> None:
        self.chunks = [(place, chunk) for place, chunk in enumerate(plan) if chunk.sender == rank]
        self.mine = {item.index for _, chunk in self.chunks for item in chunk.items}
        self.nbytes = {place: sum(item.nbytes for item in chunk.items) for place, chunk in self.chunks}


class _Sending:
    """One walk over this rank's parameters."""

    def __init__(self, engine: NCCLTrainerWeightTransferEngine, deadline: Deadline) -> None:
        self._engine = engine
        self._deadline = deadline
        self._to = list(engine.fleet.receivers)
        self._share = engine._own_share()
        self._due = deque(self._share.chunks)
        self._here: dict[int, torch.Tensor] = {}
        self.sent = 0
        self.checksums = Checksums(enabled=engine.init_info.checksum)

    def run(self) -> None:
        engine = self._engine
        if engine._communicator is not None:
            engine._communicator.begin_round()
        for places, tensors in engine.batches():
            mine = map(self._share.mine.__contains__, places)
            self._here.update(compress(zip(places, tensors, strict=True), mine))
            # Chunks go in the order of the plan, which is that of their last parameters.
            while self._due and self._due[0][1].items[-1].index <= places[-1]:
                self._send(*self._due.popleft())
        assert not self._due, "every chunk of the plan is complete when the source ends"
        if engine._communicator is not None:
            engine._communicator.flush(self._deadline)

    def _send(self, place: int, chunk: Chunk) -> None:
        engine, slot = self._engine, None
        assert engine._communicator is not None
        assert engine._ring is not None
        indices = [item.index for item in chunk.items]
        parts = dict(zip(indices, map(self._here.pop, indices), strict=True))
        if chunk.packed:
            slot = engine._ring.acquire(self._deadline)
            buffers = [fill_chunk(slot.buffer, chunk, parts)]
        else:
            buffers = [as_bytes(part) for part in parts.values()]
        self.checksums.add(place, buffers)
        handle = engine._communicator.send(buffers, self._to, deadline=self._deadline)
        if slot is not None:
            slot.release(after=handle)
        self.sent += self._share.nbytes[place]
        if engine.on_progress is not None:
            engine.on_progress(self._progress(chunk.items[-1].index))

    def _progress(self, index: int) -> ProgressEvent:
        return ProgressEvent(
            phase="transfer",
            parameter=self._engine.metadata[index].name,
            parameters_done=index + 1,
            parameters=len(self._engine.metadata),
            bytes_done=self.sent,
            bytes=sum(self._share.nbytes.values()),
        )
