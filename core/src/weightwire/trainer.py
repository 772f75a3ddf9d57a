"""The trainer's side of a transport.

A transport subclasses `TrainerWeightTransferEngine` and writes `connect`, `transmit`, `disconnect` and what its
workers are told (`worker_init_info`). What is the same for all transports is here: opening a link, agreeing that a
round may start, the control calls beside the data plane, the vote, the report, and opening the link again once when
it was lost between two rounds.

All trainer ranks call `trainer_init` and `send_weights`; rank 0 drives the control plane.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import torch

from weightwire import API_VERSION
from weightwire.clients.protocol import ControlPlane, PauseMode, VLLMWeightSyncClient
from weightwire.control_call import ControlCall
from weightwire.deadline import Deadline
from weightwire.errors import (
    HandshakeError,
    MetadataError,
    NotInitialised,
    OrderError,
    PlanOutdated,
    TransferAborted,
    TransferError,
    Unsupported,
    WeightwireError,
    describe,
)
from weightwire.fleet import Fleet, senders_of
from weightwire.layout import ParamMeta, check_metadata, metadata_digest, total_bytes
from weightwire.load_plan import LoadPlan
from weightwire.load_plan_exchange import KnownPlans
from weightwire.membership import Membership
from weightwire.messages import TrainerInitInfo
from weightwire.rendezvous import Rendezvous
from weightwire.report import ProgressCallback, TransferReport
from weightwire.session import Revision
from weightwire.source import WeightSource
from weightwire.source_reader import PresentSource, SourceReader
from weightwire.trainer_round import TrainerRound

TTrainerInitInfo = TypeVar("TTrainerInitInfo", bound=TrainerInitInfo)


class TrainerWeightTransferEngine(ABC, Generic[TTrainerInitInfo]):
    """Sends a model's weights over one transport. Made by `trainer_init`.

    Attributes:
        control: The control plane, on every rank; only rank 0 calls it.
        fleet: Who takes part, once a link is open.
        rendezvous: The link, while there is one.
        metadata: Every parameter, as the source declares it.
        total_bytes: Size of all parameters.
        reader: This rank's passes over the source.
        next_revision: The revision that the next commit makes.
        acknowledged: The revision the workers are known to be on.
        trainer_id: Random; tells the workers this trainer from another.
        hosts_pause: Whether the workers' hosts keep readers out by themselves while they commit, as a round asks them.
        on_progress: Called with a `ProgressEvent` at every step of a transfer, on the calling thread.
    """

    init_info_cls: type[TTrainerInitInfo]
    consumes: ClassVar[Literal["full", "local"]] = "full"
    """Which mode of the source this transport reads."""
    wire_version: ClassVar[int] = 1
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

    def update_info(self) -> dict[str, Any]:
        """What this transport adds to each round's update message."""
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

    def connect(self, deadline: Deadline) -> None:
        """Build the data plane to `self.fleet`."""

    def prepare_round(self) -> None:
        """Do what needs no worker, while the workers look whether they take what is coming.

        Raises:
            WeightwireError: The round cannot be; every rank hears of it, and the link stays.
        """

    def end_round(self) -> None:
        """Let go of what `prepare_round` has taken hold of: the round is over, however it ended."""

    @abstractmethod
    def transmit(self, number: int, deadline: Deadline) -> int:
        """Send this rank's part of round `number`; returns the tensor bytes sent.

        Every rank iterates `self.pairs()` or `self.batches()` to its end, also one that sends nothing, so that gathers
        line up. Tensors may be parameters; gradients are not recorded here.
        """

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Take the data plane down; with `error` it has failed and must not be waited for."""

    @property
    def path(self) -> str:
        """The way the bytes take, for the report."""
        return self.backend

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
        if source is None:
            raise MetadataError(f"backend {self.backend!r} needs a source of weights: pass source=ModuleSource(model)")
        able = source.implements_iter_full() if self.consumes == "full" else source.implements_iter_local()
        if not able:
            raise MetadataError(
                f"{type(source).__name__} does not implement iter_{self.consumes}, which backend {self.backend!r} reads"
            )
        self.metadata = tuple(source.metadata)
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
        except BaseException as error:
            if call is not None:
                call.conclude()
            self._take_down(error)
            raise

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
            rendezvous.close()

    def shutdown(self) -> None:
        """Leave the workers, who go on serving what they have; idempotent."""
        rendezvous, self.rendezvous = self.rendezvous, None
        self.disconnect(error=rendezvous.failure if rendezvous is not None else None)
        if rendezvous is not None:
            rendezvous.close()
        self._members.close()

    # A round

    def pairs(self) -> Iterator[tuple[ParamMeta, torch.Tensor]]:
        """This rank's parameters in metadata order, each checked against its metadata before it is yielded.

        Raises:
            SourceMismatch: The source yields something other than it declares.
        """
        assert self.source is not None
        return self.reader.pairs(self.source)

    def batches(self) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """Places in the metadata, and what `pairs` yields for them: many at once if all is there, else one by one.

        Raises:
            SourceMismatch: As `pairs`.
        """
        assert self.source is not None
        return self.reader.batches(self.source)

    def present(self) -> PresentSource | None:
        """This rank's parameters, if all are there anyway from the beginning to the end of the round; else None.

        `PresentSource.look` has to be called before they are used.
        """
        assert self.source is not None
        return self.reader.present(self.source)

    def send_weights(
        self,
        patches: Any = None,
        *,
        weight_version: str | None = None,
        pause: PauseMode | None = None,
        timeout: float | None = None,
    ) -> TransferReport:
        """Bring every worker to this trainer's weights: all of them or none.

        Called on every trainer rank. A link that was lost since the last round is opened again first, once.

        Args:
            patches: Only for transports that send patches.
            weight_version: A label for people, told to the workers on commit.
            pause: Pause the workers' readers around the update, in this mode.
            timeout: Deadline in seconds; None means the init info's.

        Raises:
            UpdateRefused: A worker does not take these weights; nothing moved.
            SourceMismatch: The source is not what it declared.
            TransferError: A rank failed, died or stopped; it is named, and the workers are on their old weights.
            DeadlineExceeded: The time is over; the workers are on their old weights.
        """
        if patches is not None:
            raise Unsupported(f"backend {self.backend!r} sends whole weights, not patches")
        seconds = self.init_info.timeout if timeout is None else timeout
        deadline = Deadline(seconds, what="send_weights")
        if self._members.closed:
            raise TransferError("send_weights after shutdown: make a new engine with trainer_init")
        opened = not self.linked
        if opened:
            self._reopen(deadline)
        with self._paused(pause, deadline):
            while True:
                try:
                    return self._send(weight_version, deadline, pause=pause, reinitialised=opened)
                except _LinkWasLost as lost:
                    if opened:
                        raise lost.error from lost.error.__cause__
                # The first link's failure has cancelled the first deadline; what was left of the time is left.
                deadline, opened = Deadline(deadline.remaining(), what="send_weights"), True
                self._reopen(deadline)

    @contextmanager
    def _paused(self, mode: PauseMode | None, deadline: Deadline) -> Iterator[None]:
        if mode is None or not self.is_sender or self.hosts_pause:
            yield
            return
        self.control.pause(mode, deadline)
        try:
            yield
        except BaseException:
            with suppress(WeightwireError):  # torn weights stay paused; what went wrong is told by the first error
                self.control.resume(max(1.0, deadline.remaining()))
            raise
        self.control.resume(max(1.0, deadline.remaining()))

    def _reopen(self, deadline: Deadline) -> None:
        if self.rendezvous is not None:
            self._take_down(self.rendezvous.failure or HandshakeError("the link is opened again"))
        self._open(deadline)

    def _send(
        self, label: str | None, deadline: Deadline, *, pause: PauseMode | None, reinitialised: bool
    ) -> TransferReport:
        assert self.rendezvous is not None
        asked = pause if self.hosts_pause else None
        current = TrainerRound(self, self.rendezvous, self._round, label, deadline, pause=asked)
        self._round += 1
        try:
            try:
                with self.rendezvous.watch(deadline):
                    report = current.run(reinitialised=reinitialised)
            finally:
                self.end_round()
        except BaseException as raised:
            current.conclude()
            error = self.rendezvous.explain(raised)
            lost = not current.begun and self._was_lost(error)
            if not current.refused:
                self._take_down(error)
                current.linger()
                if self.is_sender:
                    # Fire and forget: a server that stopped must not hold up the error.
                    ControlCall(lambda: self.control.abort(5.0), deadline, what="abort_weight_update").conclude()
            if lost and isinstance(error, WeightwireError):
                raise _LinkWasLost(error) from raised
            if error is not raised:
                raise error from raised
            raise
        self.acknowledged = Revision.from_json(report.revision)
        self.next_revision = Revision(self.next_revision.lineage, self.next_revision.number + 1)
        return report

    def _was_lost(self, error: BaseException) -> bool:
        """Whether a round that has not begun failed because the link was lost; not because somebody refused it."""
        if isinstance(error, PlanOutdated):
            return True
        if isinstance(error, OrderError | TransferAborted):
            return isinstance(error, NotInitialised)
        return not self.linked


class _LinkWasLost(Exception):
    """The link turned out to be lost before the round began, so that nothing moved and it may be opened again."""

    def __init__(self, error: WeightwireError) -> None:
        super().__init__(str(error))
        self.error = error
