"""The worker's side: receives every chunk of the plan, large parameters straight into their staged storage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from weightwire.checksums import Checksums
from weightwire.chunk_transfer import ChunkReceiver
from weightwire.collective import TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.engine import WeightTransferEngine
from weightwire.fleet import Fleet
from weightwire.layout import ParamMeta
from weightwire.packing import BufferRing, Chunk, plan_chunks, plan_digest
from weightwire_nccl.messages import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo


class NCCLWeightTransferEngine(WeightTransferEngine[NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo]):
    """Receives dense weights from one or more trainer ranks."""

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    stock_needs = "NCCL"

    _communicator: TorchCommunicator | None = None
    _ring: BufferRing | None = None
    _init_info: NCCLWeightTransferInitInfo | None = None
    _planned: tuple[Sequence[ParamMeta], int, bool, list[Chunk]] | None = None

    def connect(self, init_info: NCCLWeightTransferInitInfo, deadline: Deadline) -> None:
        """Join the group of senders and workers."""
        link = self._require_link()
        info = link.info
        fleet = Fleet(info.trainers, tuple(info.senders), info.workers)
        self._communicator = TorchCommunicator(
            link.rendezvous.store(f"nccl-{info.epoch}", deadline),
            rank=init_info.rank_offset + self.worker_index,
            world_size=init_info.world_size,
            labels=fleet.labels(),
            device=self.device,
            deadline=deadline,
            hostname=link.rendezvous.local_address,
            stall_limit=float(info.options.get("stall_limit", 5.0)),
            piece_bytes=init_info.packed_buffer_size_bytes,
            window=init_info.packed_num_buffers,
            collective=bool(info.options.get("collective", False)),
            senders=range(len(fleet.senders)),
        )
        self._ring = BufferRing(init_info.packed_num_buffers, init_info.packed_buffer_size_bytes, device=self.device)
        self._init_info = init_info

    def plan_digest(self, init_info: NCCLWeightTransferInitInfo) -> str:
        """Digest of the chunks that metadata and buffer size lead to."""
        return plan_digest(self._plan(self._require_link().metadata, init_info))

    def _plan(self, metadata: Sequence[ParamMeta], init_info: NCCLWeightTransferInitInfo) -> list[Chunk]:
        known = (metadata, init_info.packed_buffer_size_bytes, init_info.packed)
        if self._planned is None or self._planned[0] is not metadata or self._planned[1:3] != known[1:]:
            plan = plan_chunks(metadata, buffer_bytes=known[1], packed=known[2])
            self._planned = (*known, plan)
        return self._planned[3]

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive every chunk of the round into the sink.

        Raises:
            TransferError: Not initialised.
            PeerLost: A sender died or stopped.
        """
        if self._communicator is None or self._init_info is None:
            raise self.not_initialised()
        assert self._ring is not None
        link, sink, info = self._require_link(), self.sink, self._init_info
        metadata = self.update_metadata(update_info)
        chunks = self._plan(metadata, info)
        checksums = Checksums(enabled=link.info.checksum)
        # In the order of the chunks, so that what travels together can be copied together.
        names = chain.from_iterable(chunk.names for chunk in chunks)
        ChunkReceiver(
            chunks,
            metadata,
            self._communicator,
            self._ring,
            senders={rank: place for place, rank in enumerate(link.info.senders)},
            targets=sink.targets(names) if "targets" in sink.capabilities else {},
            received=sink.received,
            load=sink.load,
            loose_bytes=info.packed_num_buffers * info.packed_buffer_size_bytes,
            deadline=self.deadline,
            device=self.device,
            checksums=checksums,
        ).run()
        if link.info.checksum:
            payloads = link.gather(f"checksum-{update_info.round}", self.deadline)
            for rank in link.info.senders:
                checksums.compare(payloads[rank], lambda place: chunks[place].names, transport=self.backend)

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Leave the group; one that failed is parked until its threads have ended."""
        communicator, self._communicator = self._communicator, None
        ring, self._ring = self._ring, None
        if communicator is not None:
            communicator.leave([ring, self.sink], error=error)
