"""The trainer's side: the link, and sending one payload to all workers.

`trainer_init` makes one of two engines: with a source, one that finds by itself what changed (tracking_trainer.py);
without one, one that sends a caller's patches (patch_trainer.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch

from weightwire.clients.protocol import VLLMWeightSyncClient
from weightwire.collective import TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.packing import BufferRing, plan_digest
from weightwire.report import ProgressEvent
from weightwire.source import WeightSource
from weightwire.trainer import TrainerWeightTransferEngine
from weightwire_sparse import compression, payload
from weightwire_sparse.changes import Bytes, Changes
from weightwire_sparse.delta import Announcement, Delta
from weightwire_sparse.dense import DensePlan, dense_plan
from weightwire_sparse.messages import SparseNCCLTrainerInitInfo
from weightwire_sparse.pieces import AddressSpace, spaces_of
from weightwire_sparse.tracker import DeltaTracker


class SparseNCCLTrainerWeightTransferEngine(TrainerWeightTransferEngine[SparseNCCLTrainerInitInfo]):
    """Sends what changed since the weights that the workers hold.

    Attributes:
        tracker: What this rank knows of the workers' weights; there is none without a source.
    """

    init_info_cls = SparseNCCLTrainerInitInfo
    consumes = "local"
    needs_source: ClassVar[bool] = False
    needs_load_plans = True

    tracker: DeltaTracker
    _communicator: TorchCommunicator | None = None
    _ring: BufferRing | None = None
    _packed: Bytes | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: SparseNCCLTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """See `TrainerWeightTransferEngine.trainer_init`; without a source, an engine for patches."""
        from weightwire_sparse.patch_trainer import PatchTrainer
        from weightwire_sparse.tracking_trainer import TrackingTrainer

        kind = PatchTrainer if source is None else TrackingTrainer
        if not issubclass(cls, kind):
            return cast(Self, kind.trainer_init(init_info, client=client, source=source))
        return super().trainer_init(init_info, client=client, source=source)

    def _configure(self, info: SparseNCCLTrainerInitInfo) -> None:
        super()._configure(info)
        compression.check(info.compression)
        self._kernels = payload.choose(info.kernels)
        self._spaces: dict[int, AddressSpace] = spaces_of(self.metadata, self._members.trainers)
        self._dense: DensePlan = dense_plan(self._spaces, info.packed_buffer_size_bytes)
        self._details: dict[str, Any] = {}

    # The link

    def choose_senders(self, trainers: int) -> tuple[int, ...]:
        """Every rank of which a piece is sent."""
        super().choose_senders(trainers)
        return tuple(spaces_of(self.metadata, trainers)) or (0,)

    def worker_init_info(self) -> dict[str, Any]:
        """The data plane's ranks, and the sizes that the plan depends on."""
        assert self.rendezvous is not None
        info = self.init_info
        return {
            "master_address": info.master_address,
            "master_port": self.rendezvous.port,
            "rank_offset": self.fleet.rank_offset,
            "world_size": self.fleet.world_size,
            "packed_buffer_size_bytes": info.packed_buffer_size_bytes,
            "packed_num_buffers": info.packed_num_buffers,
        }

    def link_options(self) -> dict[str, Any]:
        """How long to wait for a peer that does not move, when a round goes dense, and what packs values."""
        info = self.init_info
        return {"stall_limit": info.stall_limit, "dense_above": info.dense_above, "compression": info.compression}

    def plan_digest(self) -> str:
        """Digest of the chunks of a dense round."""
        return plan_digest(self._dense.chunks)

    def connect(self, deadline: Deadline) -> None:
        """Join the group of senders and workers; a rank that sends nothing stays out of it."""
        if self.rank not in self.fleet.senders:
            return
        assert self.rendezvous is not None
        info, device = self.init_info, self._device()
        payload.warm(self._kernels)
        self._communicator = TorchCommunicator(
            self.rendezvous.store(f"sparse-{self.epoch}", deadline),
            rank=self.fleet.senders.index(self.rank),
            world_size=self.fleet.world_size,
            labels=self.fleet.labels(),
            device=device,
            deadline=deadline,
            hostname=self.rendezvous.local_address,
            stall_limit=info.stall_limit,
            piece_bytes=info.packed_buffer_size_bytes,
            window=info.packed_num_buffers,
            senders=range(len(self.fleet.senders)),
        )
        self._ring = BufferRing(info.packed_num_buffers, info.packed_buffer_size_bytes, device=device)

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Leave the group; one that failed is parked until its threads have ended."""
        communicator, self._communicator = self._communicator, None
        ring, self._ring = self._ring, None
        self._packed = None  # a failed group may still read it
        if communicator is not None:
            communicator.leave([ring, self.source], error=error)

    # A round

    @property
    def path(self) -> str:
        """The way the bytes took, for the report."""
        kind = "NCCL" if self._device().type == "cuda" else "gloo"
        way = self._details.get("way", "delta")
        return f"{kind} point to point, {way}, {len(self.fleet.senders)} sending to {self.fleet.workers}"

    def report_details(self) -> dict[str, Any]:
        """Which way the round took and why, what changed, and which kernels ran."""
        return self._details

    def pack(self, changes: Changes, space: AddressSpace) -> Delta:
        """Code changes for the wire."""
        info = self.init_info
        built = payload.build(
            changes,
            space,
            compression=info.compression,
            kernels=self._kernels,
            threads=info.threads,
            out=self._packing_memory,
        )
        return Delta(built.buffer, built.saved, len(changes.addresses))

    def _packing_memory(self, nbytes: int) -> Bytes:
        """Memory for one payload, kept from one round to the next, since new memory is slow."""
        if self._packed is None or len(self._packed) < nbytes:
            self._packed = np.empty(nbytes + nbytes // 4, np.uint8)
        return self._packed[:nbytes]

    def announce(
        self, phase: str, delta: Delta | None, spaces: Mapping[int, AddressSpace], deadline: Deadline
    ) -> dict[int, Announcement]:
        """Say what this rank has to send; returns what each sender has."""
        assert self.rendezvous is not None
        own = Announcement(None) if delta is None else delta.announcement
        outcome = self.rendezvous.exchange(phase, deadline=deadline, payload=own.to_json(), gather=True)
        outcome.raise_failed()
        return {rank: Announcement.from_json(outcome.payloads[rank], space) for rank, space in spaces.items()}

    def transfer(self, delta: Delta, deadline: Deadline) -> int:
        """Send a delta that was announced to all workers; returns its bytes."""
        self._details |= delta.describe()
        if self._communicator is None:
            return 0
        self._communicator.begin_round()
        buffers = [torch.from_numpy(part).to(self._device()) for part in (delta.payload, *delta.whole.values())]
        self._communicator.send(buffers, list(self.fleet.receivers), deadline=deadline)
        self._communicator.flush(deadline)
        sent = sum(map(torch.numel, buffers))
        self.told(len(self.round_metadata), sent, sent)
        return sent

    def told(self, parameters: int, sent: int, total: int) -> None:
        """Tell whoever wants to know that so many parameters and bytes have been sent."""
        if self.on_progress is not None:
            event = ProgressEvent(
                phase="transfer",
                parameters_done=parameters,
                parameters=len(self.round_metadata),
                bytes_done=sent,
                bytes=total,
            )
            self.on_progress(event)
