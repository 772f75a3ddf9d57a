"""The trainer's side: every parameter goes from its first owner to all workers.

What is small is copied into a ring of reusable buffers and travels packed; what is large travels from its own storage
in pieces, several in flight. Memory beyond the model is the ring.
"""

from __future__ import annotations

from typing import Any, Self, cast

from weightwire.checksums import Checksums
from weightwire.chunk_transfer import ChunkSender, ChunkShare
from weightwire.clients.protocol import VLLMWeightSyncClient
from weightwire.collective import TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.packing import BufferRing, Chunk, plan_chunks, plan_digest
from weightwire.report import ProgressEvent
from weightwire.source import WeightSource
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
    _share: ChunkShare | None = None

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

    def _own_share(self) -> ChunkShare:
        if self._share is None:
            self._share = ChunkShare(self._plan(), self.rank)
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
        checksums = Checksums(enabled=self.init_info.checksum)
        sending = ChunkSender(
            self._own_share(),
            self._communicator,
            self._ring,
            list(self.fleet.receivers),
            deadline=deadline,
            checksums=checksums,
            tell=self._told,
        )
        for places, tensors in self.batches():
            sending.give(places, tensors)
        sending.finish()
        if self.init_info.checksum:
            assert self.rendezvous is not None
            self.rendezvous.exchange(
                f"checksum-{number}", deadline=deadline, payload=checksums.values, gather=True
            ).raise_failed()
        return sending.sent

    def _told(self, place: int, sent: int) -> None:
        if self.on_progress is not None:
            event = ProgressEvent(
                phase="transfer",
                parameter=self.metadata[place].name,
                parameters_done=place + 1,
                parameters=len(self.metadata),
                bytes_done=sent,
                bytes=self._own_share().total,
            )
            self.on_progress(event)

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Leave the group; one that failed is parked until its threads have ended."""
        communicator, self._communicator = self._communicator, None
        ring, self._ring = self._ring, None
        if communicator is not None:
            communicator.leave([ring, self.source], error=error)
