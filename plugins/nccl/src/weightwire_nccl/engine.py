"""The worker's side: receives every chunk of the plan, large parameters straight into their staged storage."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from weightwire.checksums import Checksums
from weightwire.collective import Handle, TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.engine import WeightTransferEngine
from weightwire.errors import Unsupported
from weightwire.fleet import Fleet
from weightwire.layout import ParamMeta
from weightwire.packing import BufferRing, Chunk, Slot, plan_chunks, plan_digest, unpack_chunk
from weightwire.source import as_bytes
from weightwire_nccl.messages import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo


@dataclass(slots=True)
class _Arriving:
    """A chunk on its way: where it lands, and what has to be done once it is here."""

    place: int
    handle: Handle
    buffers: list[torch.Tensor]
    slot: Slot | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)


class NCCLWeightTransferEngine(WeightTransferEngine[NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo]):
    """Receives dense weights from one or more trainer ranks."""

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo

    _communicator: TorchCommunicator | None = None
    _ring: BufferRing | None = None
    _init_info: NCCLWeightTransferInitInfo | None = None
    _planned: tuple[Sequence[ParamMeta], int, bool, list[Chunk]] | None = None

    def connect(self, init_info: NCCLWeightTransferInitInfo, deadline: Deadline) -> None:
        """Join the group of senders and workers.

        Raises:
            Unsupported: The trainer is a stock vLLM one, which needs NCCL.
        """
        link = self.link
        if link is None:
            raise Unsupported(
                "the init_info has no key 'weightwire', so it comes from a stock vLLM trainer, and that needs NCCL on "
                "both sides; use weightwire's trainer engine",
                transport=self.backend,
            )
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
        metadata = self.update_metadata(update_info)
        _Reception(self, self._communicator, metadata, self._plan(metadata, self._init_info)).run(update_info.round)

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Leave the group; one that failed is parked until its threads have ended."""
        communicator, self._communicator = self._communicator, None
        ring, self._ring = self._ring, None
        if communicator is not None:
            communicator.leave([ring, self.sink], error=error)


class _Reception:
    """The chunks of one round, received in the order of the plan with several on their way."""

    def __init__(
        self,
        engine: NCCLWeightTransferEngine,
        communicator: TorchCommunicator,
        metadata: Sequence[ParamMeta],
        chunks: Sequence[Chunk],
    ) -> None:
        ring, link, info = engine._ring, engine.link, engine._init_info
        assert ring is not None and link is not None and info is not None
        self._sink = engine.sink
        self._ring = ring
        self._link = link
        self._communicator = communicator
        self._metadata = metadata
        self._chunks = chunks
        self._deadline = engine.deadline
        self._device = engine.device
        # In the order of the chunks, so that what travels together can be copied together.
        names = chain.from_iterable(chunk.names for chunk in chunks)
        self._targets = self._sink.targets(names) if "targets" in self._sink.capabilities else {}
        self._arriving: deque[_Arriving] = deque()
        self._loose_bytes = 0
        self._ring_bytes = info.packed_num_buffers * info.packed_buffer_size_bytes
        self._checksums = Checksums(enabled=link.info.checksum)

    def run(self, number: int | None) -> None:
        self._communicator.begin_round()
        for place, chunk in enumerate(self._chunks):
            self._post(place, chunk)
        while self._arriving:
            self._take()
        if self._link.info.checksum:
            self._compare(number)

    def _post(self, place: int, chunk: Chunk) -> None:
        source = self._link.info.senders.index(chunk.sender)
        slot, tensors = None, []
        if chunk.packed:
            while (slot := self._ring.try_acquire()) is None:
                self._take()
            buffers = [slot.buffer[: chunk.nbytes]]
        else:
            tensors = self._landings([self._metadata[item.index] for item in chunk.items])
            buffers = [as_bytes(tensor) for tensor in tensors]
        handle = self._communicator.receive(buffers, source, deadline=self._deadline)
        self._arriving.append(_Arriving(place, handle, buffers, slot, tensors))

    def _landings(self, metas: Sequence[ParamMeta]) -> list[torch.Tensor]:
        """Where large parameters land: their targets, or memory of their own for a sink that has none for them."""
        loose = self._loose(metas)
        # At most one ring's worth of such memory is on its way at a time.
        while self._arriving and loose and self._loose_bytes + loose > self._ring_bytes:
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
        """Wait for the oldest chunk and hand it to the sink."""
        arrived = self._arriving.popleft()
        arrived.handle.wait(self._deadline)
        self._checksums.add(arrived.place, arrived.buffers)
        chunk = self._chunks[arrived.place]
        if arrived.slot is not None:
            copied, views = unpack_chunk(arrived.buffers[0], chunk, self._metadata, self._targets)
            if copied:
                self._sink.received(copied)
            self._sink.load(views)
            arrived.slot.release()
            return
        metas = [self._metadata[item.index] for item in chunk.items]
        if direct := [meta.name for meta in metas if meta.name in self._targets]:
            self._sink.received(direct)
        loose = [
            (meta.name, tensor)
            for meta, tensor in zip(metas, arrived.tensors, strict=True)
            if meta.name not in self._targets
        ]
        if loose:
            self._sink.load(loose)
            self._loose_bytes -= self._loose(metas)

    def _compare(self, number: int | None) -> None:
        payloads = self._link.gather(f"checksum-{number}", self._deadline)
        for rank in self._link.info.senders:
            self._checksums.compare(payloads[rank], lambda place: self._chunks[place].names, transport="nccl")
