"""A trainer rank's link to its workers, from joining them to leaving.

What a transport writes of it is `connect`, `disconnect` and what its workers are told; the rest is the same for all.
"""

from __future__ import annotations

import secrets
from abc import ABC
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from weightwire import API_VERSION
from weightwire.clients.protocol import ControlPlane, VLLMWeightSyncClient
from weightwire.control_call import ControlCall
from weightwire.deadline import Deadline
from weightwire.errors import MetadataError, describe
from weightwire.fleet import Fleet, senders_of
from weightwire.layout import ParamMeta, check_metadata, metadata_digest, total_bytes
from weightwire.load_plan import LoadPlan
from weightwire.load_plan_exchange import KnownPlans
from weightwire.membership import Membership
from weightwire.messages import TrainerInitInfo
from weightwire.parting import Parting
from weightwire.rendezvous import Rendezvous
from weightwire.report import ProgressCallback
from weightwire.session import Revision
from weightwire.source import WeightSource
from weightwire.source_reader import SourceReader

TTrainerInitInfo = TypeVar("TTrainerInitInfo", bound=TrainerInitInfo)


class TrainerLink(ABC, Generic[TTrainerInitInfo]):
    """What `TrainerWeightTransferEngine` is, but for sending.

    Attributes:
        control: The control plane, on every rank; only rank 0 calls it.
        fleet: Who takes part, once a link is open.
        rendezvous: The link, while there is one.
        metadata: Every parameter, as the source declares it.
        total_bytes: Size of all parameters.
        reader: This rank's passes over the source.
        load_plans: What each worker rank loads, for a transport that needs to know.
        next_revision: The revision that the next commit makes.
        acknowledged: The revision the workers are known to be on.
        trainer_id: Random; tells the workers this trainer from another.
        hosts_pause: Whether the workers' hosts keep readers out by themselves while they commit, as a round asks them.
        on_progress: Called with a `ProgressEvent` at every step of a transfer, on the calling thread.
    """

    init_info_cls: type[TTrainerInitInfo]
    consumes: Literal["full", "local"] = "full"
    """Which mode of the source this transport reads."""
    wire_version: ClassVar[int] = 1
    needs_source: ClassVar[bool] = True
    """Whether there is nothing to send without a source."""
    needs_load_plans: ClassVar[bool] = False
    """Whether it plans from what the workers load: `load_plans` then holds one for each worker rank."""

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
        is_sender: bool = True,
        rank: int = 0,
    ) -> None:
        self.client = client
        self.source = source
        self.is_sender = is_sender
        self.rank = rank
        self.hosts_pause = False
        self.on_progress: ProgressCallback | None = None
        self.init_info: TTrainerInitInfo
        self.fleet: Fleet
        self.rendezvous: Rendezvous | None = None
        self.metadata: tuple[ParamMeta, ...] = ()
        self.metadata_digest = ""
        self.total_bytes = 0
        self.reader: SourceReader
        self._members: Membership
        self.load_plans: list[LoadPlan] = []
        self._known_plans = KnownPlans()
        self.trainer_id = secrets.token_hex(16)
        self._round = 0
        self.next_revision = Revision(secrets.token_hex(16), 1)
        self.acknowledged: Revision | None = None

    @property
    def client(self) -> VLLMWeightSyncClient:
        """The workers' control plane; set it to drive other servers from the next link on."""
        return self.control.client

    @client.setter
    def client(self, client: VLLMWeightSyncClient) -> None:
        self.control = ControlPlane(client)

    # What a transport writes

    def worker_init_info(self) -> dict[str, Any]:
        """What the workers are initialised with, without the `weightwire` key."""
        return {}

    def link_options(self) -> dict[str, Any]:
        """Settings the workers have to share that the reference's init info has no field for."""
        return {}

    def plan_digest(self) -> str:
        """Digest of what this transport derives from metadata; compared with the workers' before connecting."""
        return ""

    def choose_senders(self, trainers: int) -> tuple[int, ...]:
        """Which of so many trainer ranks send tensor bytes: by default the first owner of each parameter.

        Raises:
            MetadataError: A parameter is owned by a rank that does not exist.
        """
        return senders_of(self.metadata, trainers=trainers)

    @property
    def goes_on_without_workers(self) -> bool:
        """Whether the open data plane serves the others when some workers have parted."""
        return False

    def connect(self, deadline: Deadline) -> None:
        """Build the data plane to `self.fleet`."""

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Take the data plane down; with `error` it has failed and must not be waited for."""

    # Opening and closing a link

    @property
    def backend(self) -> str:
        """Backend name."""
        return self.init_info_cls.backend

    @classmethod
    def trainer_init(
        cls,
        init_info: TTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Connect to the workers behind `client` and return an engine that is ready to send.

        Called on every trainer rank.

        Raises:
            MessageError: World size, ranks or secret do not add up.
            MetadataError: No source, or one that this transport cannot read.
            HandshakeError: The two sides expect different things.
            PeerLost, DeadlineExceeded: A rank did not come; it is named.
        """
        engine = cls(client=client, source=source, is_sender=init_info.rank == 0, rank=init_info.rank)
        engine._configure(init_info)
        try:
            engine._open(Deadline(init_info.timeout, what="trainer_init"))
        except BaseException:
            engine._members.close()
            raise
        return engine

    def _configure(self, info: TTrainerInitInfo) -> None:
        self.init_info = info
        source = self.source
        if source is None and self.needs_source:
            raise MetadataError(f"backend {self.backend!r} needs a source of weights: pass source=ModuleSource(model)")
        if source is not None:
            able = source.implements_iter_full() if self.consumes == "full" else source.implements_iter_local()
            if not able:
                raise MetadataError(
                    f"{type(source).__name__} does not implement iter_{self.consumes}, which backend "
                    f"{self.backend!r} reads"
                )
        self.metadata = () if source is None else tuple(source.metadata)
        check_metadata(self.metadata)
        self.metadata_digest = metadata_digest(self.metadata)
        self.total_bytes = total_bytes(self.metadata)
        self.reader = SourceReader(self.metadata, self.rank, self.consumes)
        self._members = Membership(info, source, self.choose_senders)

    def _open(self, deadline: Deadline) -> None:
        self._round = 0
        call: ControlCall | None = None
        try:
            self.rendezvous, self.fleet = self._members.join(self.control, deadline)
            with self.rendezvous.watch(deadline):
                if self.is_sender:
                    payload = {**self.worker_init_info(), "weightwire": self._link_info()}
                    call = ControlCall(
                        lambda: self.control.initialise(payload, deadline),
                        deadline,
                        what="init_weight_transfer_engine",
                    )
                self._hello(deadline)
                if self.needs_load_plans:
                    self.load_plans = self._known_plans.exchange(self.rendezvous, deadline)
                self._agree("plan", deadline, {"plan": self.plan_digest()})
                self.connect(deadline)
                self._agree("connected", deadline, {})
                if call is not None:
                    call.result()
                    self._let_servers_go(self.rendezvous.parting)
        except BaseException as error:
            if call is not None:
                call.conclude()
            self._take_down(error)
            raise

    def _let_servers_go(self, parting: Parting) -> None:
        """From now on whoever loses a server loses no round, if client and transport can do that."""
        first = self.fleet.trainers
        if not self.goes_on_without_workers:
            return
        servers = self.control.let_servers_go(lambda worker, error: parting.part(first + worker, error))
        if servers is not None:
            workers, least = servers
            parting.on_parted = lambda ranks, error: self.control.leave_out([rank - first for rank in ranks], error)
            parting.allow(([first + worker for worker in group] for group in workers), least=least)

    def parted_workers(self) -> list[int]:
        """The worker ranks that the open link goes on without."""
        link = self.rendezvous
        return [rank - self.fleet.trainers for rank in link.parting.parted] if link is not None else []

    def _link_info(self) -> dict[str, Any]:
        return {
            "api": list(API_VERSION),
            "wire": self.wire_version,
            "backend": self.backend,
            "trainer": self.trainer_id,
            **self._members.address(),
            "workers": self.fleet.workers,
            "metadata": [meta.to_json() for meta in self.metadata],
            # A link opened again is this trainer's own: nobody is taken over.
            "takeover": self.init_info.takeover,
            "checksum": self.init_info.checksum,
            "options": self.link_options(),
            "timeout": self.init_info.timeout,
        }

    def _hello(self, deadline: Deadline) -> None:
        assert self.rendezvous is not None
        agree = {
            "backend": self.backend,
            "wire": self.wire_version,
            "metadata": self.metadata_digest,
            "senders": list(self._members.senders),
        }
        outcome = self.rendezvous.exchange("hello", deadline=deadline, agree=agree, gather=self.is_sender)
        outcome.raise_failed()
        workers = [payload for payload in outcome.payloads.values() if isinstance(payload, dict)]
        self.hosts_pause = bool(workers) and all(payload.get("pauses_at_commit") for payload in workers)

    def _agree(self, phase: str, deadline: Deadline, agree: dict[str, Any]) -> None:
        assert self.rendezvous is not None
        self.rendezvous.exchange(phase, deadline=deadline, agree=agree).raise_failed()

    @property
    def epoch(self) -> int:
        """Number of the present link among this engine's links."""
        return self._members.epoch

    @property
    def linked(self) -> bool:
        """Whether every rank of the fleet is still there, as far as is known."""
        link = self.rendezvous
        return link is not None and link.failure is None and not link.closed

    def _take_down(self, error: BaseException) -> None:
        """The link is unusable: tell every rank why, and leave it."""
        rendezvous, self.rendezvous = self.rendezvous, None
        if rendezvous is not None:
            rendezvous.fail(describe(error, transport=self.backend, rank=rendezvous.label()))
        self.disconnect(error=error)
        if rendezvous is not None:
            self._members.leave(rendezvous)

    def shutdown(self) -> None:
        """Leave the workers, who go on serving what they have; idempotent."""
        rendezvous, self.rendezvous = self.rendezvous, None
        self.disconnect(error=rendezvous.failure if rendezvous is not None else None)
        if rendezvous is not None:
            rendezvous.close()
        self._members.close()
