"""The worker's side: receives the regions that its model loads, and nothing else."""

from __future__ import annotations

from typing import Any

from weightwire.checksums import Checksums
from weightwire.collective import TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.engine import WeightTransferEngine
from weightwire.errors import PlanOutdated
from weightwire.fleet import Fleet
from weightwire.load_plan import LoadPlan
from weightwire.packing import BufferRing
from weightwire.resharding.incoming import Incoming, Receiving, incoming_of
from weightwire.resharding.receipts import compare_received, message_number
from weightwire.sink import UpdateSpec
from weightwire_m2n.messages import M2NWeightTransferInitInfo, M2NWeightTransferUpdateInfo, message_bytes
from weightwire_m2n.planning import Share, Shares
from weightwire_m2n.routing import routes

_LISTED = 20


class M2NWeightTransferEngine(WeightTransferEngine[M2NWeightTransferInitInfo, M2NWeightTransferUpdateInfo]):
    """Receives what the sink's load plan asks for, from the trainer ranks that hold it."""

    init_info_cls = M2NWeightTransferInitInfo
    update_info_cls = M2NWeightTransferUpdateInfo
    supports_draft_weight_update = False
    needs_load_plans = True
    stock_needs = "NVIDIA's extension"

    _communicator: TorchCommunicator | None = None
    _ring: BufferRing | None = None
    _shares: Shares[Incoming] | None = None
    _share: Share[Incoming] | None = None
    _own: LoadPlan | None = None

    def plan_digest(self, init_info: M2NWeightTransferInitInfo) -> str:
        """Digest of who sends what to whom.

        Raises:
            UpdateRefused: No worker takes a parameter, and this sink is strict.
        """
        link = self._require_link()
        if self._shares is None:
            self._shares = Shares(incoming_of)
        self._share = self._shares.get(link.metadata, link.info.trainers, self.load_plans, init_info, link.worker)
        self._share.coverage.check(strict=self.sink.strict, foreign=link.info.options.get("foreign", ()))
        return self._share.digest

    def connect(self, init_info: M2NWeightTransferInitInfo, deadline: Deadline) -> None:
        """Connect to the trainer ranks that send to this worker."""
        link, share = self._require_link(), self._share
        assert share is not None, "plans are compared before anything connects"
        if not share.part.messages and self.device.type != "cuda":
            return
        info = link.info
        fleet = Fleet(info.trainers, tuple(info.senders), info.workers)
        self._communicator = TorchCommunicator(
            link.rendezvous.store(f"m2n-{info.epoch}", deadline),
            rank=fleet.rank_offset + link.worker,
            world_size=init_info.world_size,
            labels=fleet.labels(),
            device=self.device,
            deadline=deadline,
            hostname=link.rendezvous.local_address,
            stall_limit=float(info.options["stall_limit"]),
            piece_bytes=init_info.buffer_bytes,
            window=init_info.num_buffers,
            routes=routes(share.pairs, fleet),
        )
        senders = len({message.sender for message in share.part.messages})
        most = message_bytes(init_info.buffer_bytes, init_info.num_buffers, info.workers)
        self._ring = BufferRing(senders + init_info.num_buffers, most, device=self.device)

    # A round

    def check_update(self, spec: UpdateSpec) -> None:
        """See `WeightTransferEngine.check_update`.

        Raises:
            PlanOutdated: The update brings other parameters than were declared, or the model loads otherwise now.
        """
        link = self._require_link()
        if spec.metadata is not link.metadata and spec.metadata != link.metadata:
            raise PlanOutdated("the update brings other parameters than the plan of this link is made for")
        own = self.sink.load_plan(link.metadata)
        planned = self.load_plans[link.worker]
        if own is not planned and own.digest() != planned.digest():
            raise PlanOutdated("this worker's model is laid out otherwise than when the transfer was planned")
        self._own = own

    def update_bytes(self, spec: UpdateSpec) -> int:
        """What crosses to this rank."""
        return self._share.part.nbytes if self._share is not None else super().update_bytes(spec)

    def receive_weights(self, update_info: M2NWeightTransferUpdateInfo) -> None:
        """Receive every message of the round into the sink's memory.

        Raises:
            TransferError: Not initialised.
            PeerLost: A sender died or stopped.
        """
        link, own, share = self._require_link(), self._own, self._share
        if own is None or share is None:
            raise self.not_initialised()
        checksums = Checksums(enabled=link.info.checksum)
        landing = self.sink.landing(own)
        if self._communicator is not None:
            assert self._ring is not None
            self._communicator.begin_round()
            Receiving(
                share.part,
                self._communicator,
                self._ring,
                {place: landing[target.name] for place, target in enumerate(own.targets) if target.name in landing},
                sources={rank: place for place, rank in enumerate(link.info.senders)},
                deadline=self.deadline,
                checksums=checksums,
                number=lambda message: message_number(message.sender, link.worker, message.ordinal),
            ).run()
        del landing
        if link.info.checksum:
            self._compare(update_info.round, checksums)
        self.sink.landed(own)

    def _compare(self, number: int | None, checksums: Checksums) -> None:
        link, share = self._require_link(), self._share
        assert share is not None
        payloads = link.gather(f"checksum-{number}", self.deadline)
        sent = [payloads[rank] for rank in link.info.senders]
        compare_received(checksums, sent, share.part.messages, link.worker, link.metadata, transport=self.backend)

    def report_details(self) -> dict[str, Any]:
        """What the model could only take in full and what nothing filled, the first few of each."""
        if self._own is None:
            return {}
        return {
            "opaque": [[one.module, one.reason] for one in self._own.opaque[:_LISTED]],
            "opaque_bytes": self._own.opaque_bytes,
            "unfilled": dict(self._own.unfilled[:_LISTED]),
        }

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Leave the group; one that failed is parked until its threads have ended."""
        communicator, self._communicator = self._communicator, None
        ring, self._ring = self._ring, None
        if communicator is not None:
            communicator.leave([ring, self.sink], error=error)
