"""The trainer's side: every rank sends what the plan asks of it, from its own shards; nobody gathers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from weightwire.checksums import Checksums
from weightwire.collective import TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.fleet import owners_of
from weightwire.packing import BufferRing
from weightwire.report import ProgressEvent
from weightwire.resharding.outgoing import Outgoing, Sending, new_ring, outgoing_of
from weightwire.resharding.receipts import message_number
from weightwire.trainer import TrainerWeightTransferEngine
from weightwire_m2n.layout_files import write_source_layout, write_worker_layouts
from weightwire_m2n.messages import M2NTrainerInitInfo, message_bytes
from weightwire_m2n.planning import Share, Shares
from weightwire_m2n.routing import routes

_NO_LIMIT: Final = 86400.0
"""Seconds; every operation ends with its deadline anyway."""


class M2NTrainerWeightTransferEngine(TrainerWeightTransferEngine[M2NTrainerInitInfo]):
    """Sends each worker the regions that it loads, each byte once."""

    init_info_cls = M2NTrainerInitInfo
    consumes = "local"
    needs_load_plans = True

    _communicator: TorchCommunicator | None = None
    _ring: BufferRing | None = None
    _shares: Shares[Outgoing] | None = None
    _share: Share[Outgoing] | None = None

    def choose_senders(self, trainers: int) -> tuple[int, ...]:
        """Every rank that owns anything: which owner of a replica sends is for the plan to say."""
        return owners_of(self.metadata, trainers=trainers)

    def worker_init_info(self) -> dict[str, Any]:
        """The data plane's ranks, and the sizes that the plan depends on."""
        assert self.rendezvous is not None
        info = self.init_info
        return {
            "master_address": info.master_address,
            "master_port": self.rendezvous.port,
            "rank_offset": self.fleet.rank_offset,
            "world_size": self.fleet.world_size,
            "buffer_bytes": info.buffer_bytes,
            "num_buffers": info.num_buffers,
            "direct_bytes": info.direct_bytes,
        }

    def link_options(self) -> dict[str, Any]:
        """What may go to nobody, and how long to wait for a peer that does not move."""
        return {"stall_limit": self._stall_limit, "foreign": self.init_info.foreign}

    @property
    def _stall_limit(self) -> float:
        return self.init_info.stall_limit or _NO_LIMIT

    def plan_digest(self) -> str:
        """Digest of who sends what to whom."""
        info = self.init_info
        if self._shares is None:
            self._shares = Shares(outgoing_of)
        self._share = self._shares.get(self.metadata, self.fleet.trainers, self.load_plans, info, self.rank)
        if info.layouts is not None and self.rank == 0:
            directory = Path(info.layouts)
            directory.mkdir(parents=True, exist_ok=True)
            write_source_layout(directory / "source.json", self.metadata, self.fleet.trainers)
            write_worker_layouts(directory / "workers.json", self.load_plans)
        return self._share.digest

    @property
    def plans_made(self) -> int:
        """How often a plan was made: links between the same ranks share one."""
        return self._shares.made if self._shares is not None else 0

    @property
    def path(self) -> str:
        """The way the bytes take, for the report."""
        assert self._share is not None
        kind = "NCCL" if self._device().type == "cuda" else "gloo"
        senders = len({sender for sender, _ in self._share.pairs})
        return f"{kind} point to point, {senders} of {self.fleet.trainers} ranks sending to {self.fleet.workers}"

    def connect(self, deadline: Deadline) -> None:
        """Connect to the workers that this rank sends to; a rank that sends nothing stays out."""
        assert self.rendezvous is not None and self._share is not None
        info, share, device = self.init_info, self._share, self._device()
        if not share.part.messages and device.type != "cuda":
            return
        self._communicator = TorchCommunicator(
            self.rendezvous.store(f"m2n-{self.epoch}", deadline),
            rank=self.fleet.senders.index(self.rank),
            world_size=self.fleet.world_size,
            labels=self.fleet.labels(),
            device=device,
            deadline=deadline,
            hostname=self.rendezvous.local_address,
            stall_limit=self._stall_limit,
            piece_bytes=info.buffer_bytes,
            window=info.num_buffers,
            routes=routes(share.pairs, self.fleet),
        )
        workers = len({message.worker for message in share.part.messages})
        most = message_bytes(info.buffer_bytes, info.num_buffers, self.fleet.workers)
        self._ring = new_ring(workers, info.num_buffers, most, device)

    def transmit(self, number: int, deadline: Deadline) -> int:
        """Send what the plan asks of this rank; the rest is iterated so that gathers line up."""
        checksums = Checksums(enabled=self.init_info.checksum)
        sending = self._sending(checksums, deadline)
        for places, tensors in self.batches():
            for place, tensor in zip(places, tensors, strict=True):
                if sending is not None:
                    sending.send(place, tensor)
            deadline.check()
        if sending is not None:
            sending.finish()
        if self.init_info.checksum:
            assert self.rendezvous is not None
            self.rendezvous.exchange(
                f"checksum-{number}", deadline=deadline, payload=checksums.values, gather=True
            ).raise_failed()
        return sending.sent if sending is not None else 0

    def _sending(self, checksums: Checksums, deadline: Deadline) -> Sending | None:
        if self._communicator is None:
            return None
        assert self._ring is not None and self._share is not None
        self._communicator.begin_round()
        return Sending(
            self._share.part,
            self._communicator,
            self._ring,
            offset=self.fleet.rank_offset,
            deadline=deadline,
            checksums=checksums,
            number=lambda message: message_number(self.rank, message.worker, message.ordinal),
            tell=self._told,
        )

    def _told(self, sent: int) -> None:
        if self.on_progress is not None:
            assert self._share is not None
            self.on_progress(
                ProgressEvent(
                    phase="transfer", parameters=len(self.metadata), bytes_done=sent, bytes=self._share.part.nbytes
                )
            )

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Leave the group; one that failed is parked until its threads have ended."""
        communicator, self._communicator = self._communicator, None
        ring, self._ring = self._ring, None
        if communicator is not None:
            communicator.leave([ring, self.source], error=error)
