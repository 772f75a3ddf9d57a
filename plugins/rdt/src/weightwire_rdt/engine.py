"""The worker's side: asks each trainer rank for the regions that its model loads, and pulls them as they are ready."""

from __future__ import annotations

from typing import Any

from weightwire.checksums import Checksums
from weightwire.deadline import Deadline
from weightwire.engine import WeightTransferEngine
from weightwire.errors import PlanOutdated, WeightwireError
from weightwire.fleet import Fleet
from weightwire.link import Link
from weightwire.load_plan import LoadPlan
from weightwire.packing import BufferRing
from weightwire.resharding.incoming import Incoming, Landing, separated
from weightwire.resharding.receipts import compare_received, message_number
from weightwire.sink import UpdateSpec
from weightwire_rdt.asking import Wanted, ask, name_of, wanted_of
from weightwire_rdt.installer import Installer
from weightwire_rdt.meeting import Meeting, available, mask_of
from weightwire_rdt.messages import ShardedRDTWeightTransferInitInfo, ShardedRDTWeightTransferUpdateInfo
from weightwire_rdt.pulling import Inbound, Pulling
from weightwire_rdt.ways import End, worker_ways

_LISTED = 20


class ShardedRDTWeightTransferEngine(
    WeightTransferEngine[ShardedRDTWeightTransferInitInfo, ShardedRDTWeightTransferUpdateInfo]
):
    """Pulls what the sink's load plan asks for, from the trainer ranks that hold it.

    `receive_weights` returns when everything has been pulled; `drain_pending` waits until it is installed.
    """

    init_info_cls = ShardedRDTWeightTransferInitInfo
    update_info_cls = ShardedRDTWeightTransferUpdateInfo
    supports_draft_weight_update = False
    defers_processing = True
    stock_needs = "Ray's executor and pickled calls"

    _wanted: Wanted | None = None
    _plan: LoadPlan | None = None
    _wire: Inbound | None = None
    _way = ""
    _incoming: Incoming | None = None
    _ring: BufferRing | None = None
    _installer: Installer | None = None
    _depth = 1
    _installing = False

    def connect(self, init_info: ShardedRDTWeightTransferInitInfo, deadline: Deadline) -> None:
        """Ask every trainer rank, and agree with all ranks how bytes travel.

        Raises:
            UpdateRefused: No worker takes a parameter, and sinks are strict.
            HandshakeError: No way for bytes works between all ranks.
        """
        link = self._require_link()
        refusal, takes = None, ""
        try:
            takes = mask_of(self._plan_for(link, init_info).takes)
        except WeightwireError as error:  # the others hear why, instead of that this rank has left
            refusal = error
        payload = {"ways": available(self.device), "takes": takes, "strict": self.sink.strict}
        members = link.gather("rdt-meet", deadline, payload, error=refusal)
        wanted = self._wanted
        assert wanted is not None
        meeting = Meeting(members, link.info.trainers, link.rendezvous.label)
        meeting.check_claimed(link.metadata, link.info.options.get("foreign", ()))
        end = End(
            link=name_of(link),
            rank=link.worker,
            peers=wanted.owners,
            fleet=Fleet(link.info.trainers, tuple(link.info.senders), link.info.workers),
            rendezvous=link.rendezvous,
            producers=ask(wanted, meeting.producers, link, deadline),
            device=self.device,
            stall=init_info.stall_timeout_s,
            piece_bytes=init_info.buffer_bytes,
            window=init_info.num_rdt_buffers,
        )
        self._way, wire = meeting.agree(
            init_info.tensor_transport,
            worker_ways(end),
            lambda phase, what: link.gather(phase, deadline, what),
            deadline,
        )
        # In pieces that are each received where they belong, if the wire can take what lies together apart.
        self._incoming = separated(wanted.incoming) if wire.divides else wanted.incoming
        self._wire = wire
        self._depth = init_info.num_rdt_buffers
        self._ring = BufferRing(self._depth + 1, init_info.buffer_bytes, device=self.device)
        if self._installer is None:
            self._installer = Installer()

    def _plan_for(self, link: Link, init_info: ShardedRDTWeightTransferInitInfo) -> Wanted:
        self._plan = plan = self.sink.load_plan(link.metadata)
        if self._wanted is None or not self._wanted.fits(plan, link, init_info):
            self._wanted = wanted_of(plan, link, init_info, whole=bool(link.info.options["whole"]))
        return self._wanted

    # A round

    def check_update(self, spec: UpdateSpec) -> None:
        """See `WeightTransferEngine.check_update`.

        Raises:
            PlanOutdated: The update brings other parameters than were declared, or the model loads otherwise now.
        """
        link = self._require_link()
        if spec.metadata is not link.metadata and spec.metadata != link.metadata:
            raise PlanOutdated("the update brings other parameters than the plan of this link is made for")
        own, planned = self.sink.load_plan(link.metadata), self._plan
        assert planned is not None
        if own is not planned and own.digest() != planned.digest():
            raise PlanOutdated("this worker's model is laid out otherwise than when it asked for its regions")
        self._plan = own

    def update_bytes(self, spec: UpdateSpec) -> int:
        """What is pulled."""
        return self._wanted.incoming.nbytes if self._wanted is not None else super().update_bytes(spec)

    def receive_weights(self, update_info: ShardedRDTWeightTransferUpdateInfo) -> None:
        """Pull every chunk of the round into the sink's memory, or into buffers that are being emptied into it.

        Raises:
            TransferError: Not initialised.
            PeerLost: A trainer rank is gone.
            PeerStalled: One has had nothing ready for too long.
            TransferError: Other bytes arrived than were sent.
        """
        link, plan = self._require_link(), self._plan
        if plan is None or self._incoming is None or self._wire is None:
            raise self.not_initialised()
        assert self._ring is not None and self._installer is not None
        checksums = Checksums(enabled=link.info.checksum)
        memory = self.sink.landing(plan)
        landing = Landing(
            {place: memory[target.name] for place, target in enumerate(plan.targets) if target.name in memory}
        )
        self._installer.begin()
        self._installing = True
        self._wire.begin_round(update_info.round or 0)
        Pulling(
            self._incoming,
            self._wire,
            self._ring,
            landing,
            self._installer,
            depth=self._depth,
            deadline=self.deadline,
            checksums=checksums,
            number=lambda message: message_number(message.sender, link.worker, message.ordinal),
        ).run()
        if checksums.enabled:
            # The trainer ranks wait for this one's, before they ask for the end of the round.
            self._installer.drain(self.deadline)
            self._compare(update_info.round, checksums)

    def drain_pending(self) -> None:
        """Wait until everything that was pulled is where it belongs; idempotent."""
        installing, self._installing = self._installing, False
        if installing:
            assert self._installer is not None and self._plan is not None
            self._installer.drain(self.deadline)
            self.sink.landed(self._plan)

    def _compare(self, number: int | None, checksums: Checksums) -> None:
        link, wanted = self._require_link(), self._wanted
        assert wanted is not None
        payloads = link.gather(f"checksum-{number}", self.deadline)
        sent = [payloads[rank] for rank in range(link.info.trainers)]
        messages = wanted.incoming.messages
        compare_received(checksums, sent, messages, link.worker, link.metadata, transport=self.backend)

    def report_details(self) -> dict[str, Any]:
        """How the bytes came, from whom, and what the model could only take in full."""
        if self._plan is None or self._wanted is None:
            return {}
        return {
            "way": self._way,
            "pulled": self._wanted.by_owner(),
            "chunks": len(self._wanted.incoming.messages),
            "opaque": [[one.module, one.reason] for one in self._plan.opaque[:_LISTED]],
            "opaque_bytes": self._plan.opaque_bytes,
            "unfilled": dict(self._plan.unfilled[:_LISTED]),
        }

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Let go of the wire. Nothing is installed any more when this returns."""
        wire, self._wire = self._wire, None
        self._installing = False
        if self._installer is not None:
            self._installer.drop()
        self._ring = None
        if wire is not None:
            wire.close(error)
