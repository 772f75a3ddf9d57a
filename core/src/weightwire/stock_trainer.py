"""A trainer engine that drives a stock vLLM server, or anything that speaks as one: what is the same on every wire.

    init     vLLM's keys, nothing else; there is no link, no vote and no rollback
    round    start, whatever the transport sends, finish

A transport subclasses `StockTrainer` and writes `open_server` and `transmit`. Rank 0 alone calls the server; the other
trainer ranks hear how each step went, so that all of them raise the same.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Self

import torch

from weightwire.clients.protocol import ControlClient, PauseMode, VLLMWeightSyncClient
from weightwire.control_call import ControlCall
from weightwire.deadline import Deadline
from weightwire.errors import MessageError, MetadataError, TransferError, Unsupported, describe
from weightwire.fleet import senders_of, trainer_count
from weightwire.layout import check_metadata, total_bytes
from weightwire.report import ProgressEvent, RankReport, TransferReport
from weightwire.source import WeightSource
from weightwire.source_reader import SourceReader
from weightwire.stock_group import StockGroup
from weightwire.trainer import TrainerWeightTransferEngine
from weightwire.trainer_link import TTrainerInitInfo


class StockTrainer(TrainerWeightTransferEngine[TTrainerInitInfo]):
    """Sends whole weights to a stock vLLM server."""

    consumes = "full"
    needs: ClassVar[str] = "a vLLM server needs VLLM_SERVER_DEV_MODE=1 for these calls"
    """Added to a failed call's words where they hold one of `symptoms`."""
    symptoms: ClassVar[tuple[str, ...]] = ("404",)

    _group: StockGroup
    _initialised = False
    _failed = False
    _closed = False

    @classmethod
    def trainer_init(
        cls,
        init_info: TTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Initialise the server behind `client` and return an engine that is ready to send.

        Called on every trainer rank.

        Raises:
            MessageError: Several trainer ranks that are not the default process group, or options of another wire.
            MetadataError: No source, or one that this wire cannot carry.
            WeightwireError: The server refused; the message says what it needs.
        """
        engine = cls(client=client, source=source, is_sender=init_info.rank == 0, rank=init_info.rank)
        engine._configure(init_info)
        engine._initialise(Deadline(init_info.timeout, what="trainer_init"))
        return engine

    # What a transport writes

    @abstractmethod
    def open_server(self, deadline: Deadline) -> None:
        """Have the server connect, by `initialise_server`. Called on rank 0 alone."""

    def owning_ranks(self, count: int) -> range:
        """Which of the `count` trainer ranks have to own every parameter."""
        return range(count)

    # Opening

    @property
    def linked(self) -> bool:
        """Whether the server was initialised and no round has failed since."""
        return self._initialised

    def _configure(self, info: TTrainerInitInfo) -> None:
        self.init_info = info
        if self.source is None or not self.source.implements_iter_full():
            raise MetadataError("wire='vllm' needs a source with iter_full: pass source=ModuleSource(model)")
        if info.checksum:
            raise MessageError(
                "a stock vLLM server compares no checksums: leave out checksum, or use wire='weightwire'"
            )
        self.metadata = tuple(self.source.metadata)
        check_metadata(self.metadata)
        count = trainer_count(info)
        senders_of(self.metadata, trainers=count)
        self.total_bytes = total_bytes(self.metadata)
        self.reader = SourceReader(self.metadata, info.rank, self.consumes)
        self._check_owners(self.owning_ranks(count))
        self._group = StockGroup(count, info.rank, transport=self.backend)

    def _check_owners(self, ranks: range) -> None:
        whom = "trainer rank 0 has" if len(ranks) == 1 else f"each of the {len(ranks)} has"
        for meta in self.metadata:
            if not all(map(meta.owned_by, ranks)):
                raise MetadataError(
                    f"parameter {meta.name!r} is owned by trainer ranks {meta.owners} only, and on vLLM's wire {whom} "
                    "to own every parameter: gather it first, or use wire='weightwire'",
                    parameter=meta.name,
                )

    def _initialise(self, deadline: Deadline) -> None:
        self._call(lambda: self.open_server(deadline), deadline)
        self._initialised, self._failed = True, False

    def initialise_server(self, message: dict[str, Any], deadline: Deadline) -> None:
        """Initialise the server; after a failure it first ends what is left there of it.

        Args:
            message: vLLM's init info.
            deadline: Bounds the calls of clients that take a timeout.
        """
        if self._failed:
            self._end_leftovers(deadline)
        self.control.initialise(message, deadline)

    def _end_leftovers(self, deadline: Deadline) -> None:
        # vLLM refuses to start an update, and to leave a trainer, until one that was started is finished. A server that
        # has nothing to end refuses this; one that is lost fails the init, which then says so.
        with suppress(Exception):
            self.control.finish(None, deadline)
        leave = getattr(self.client, "shutdown_weight_transfer_engine", None)
        if leave is not None:
            bounds = {"timeout": deadline.remaining()} if isinstance(self.client, ControlClient) else {}
            with suppress(Exception):
                leave(**bounds)

    # A round

    def prepare_round(self) -> None:
        """Compare a source whose tensors are all there with its metadata, before the server hears of the round."""
        if (present := self.present()) is not None:
            present.look(lambda tensors, plain: None)

    def send_weights(
        self,
        patches: Any = None,
        *,
        weight_version: str | None = None,
        pause: PauseMode | None = None,
        timeout: float | None = None,
    ) -> TransferReport:
        """Bring the server to this trainer's weights. A stock server that fails half-way is left half-way.

        Called on every trainer rank. After a round that failed the server is initialised again first.

        Args:
            patches: None: this wire carries whole weights.
            weight_version: A label for people, told to the server at the end.
            pause: Pause the server's readers around the update, in this mode.
            timeout: Deadline in seconds; None means the init info's.

        Raises:
            SourceMismatch: The source is not what it declared.
            WeightwireError: A rank or the server failed.
            DeadlineExceeded: The time is over.
        """
        if patches is not None:
            raise Unsupported(f"backend {self.backend!r} sends whole weights, not patches")
        if self._closed:
            raise TransferError("send_weights after shutdown: make a new engine with trainer_init")
        seconds = self.init_info.timeout if timeout is None else timeout
        deadline = Deadline(seconds, what="send_weights")
        try:
            self._group.together(self._prepare, deadline)
            with self._paused(pause, deadline):
                return self._send_open(weight_version, deadline)
        finally:
            self.end_round()

    def _prepare(self) -> dict[str, Any]:
        self.prepare_round()
        return {}

    def _send_open(self, label: str | None, deadline: Deadline) -> TransferReport:
        opened = not self._initialised
        if opened:
            self._initialise(deadline)
        try:
            return self._send_round(label, deadline, reinitialised=opened)
        except BaseException as error:
            self._give_up(error, deadline)
            raise

    def _send_round(self, label: str | None, deadline: Deadline, *, reinitialised: bool) -> TransferReport:
        seconds: dict[str, float] = {}
        with self._timed("begin", seconds):
            self._call(lambda: self.control.start(deadline, draft=self.init_info.draft), deadline)
        with self._timed("transfer", seconds), torch.no_grad():
            sent = self.transmit(self._round, deadline)
        with self._timed("finish", seconds):
            # Every rank is here: what they lent to the server is lent until it has let go of it everywhere.
            self._call(lambda: self.control.finish(label, deadline), deadline)
        self.tell(ProgressEvent(phase="done", parameters=len(self.metadata)))
        number, self._round = self._round, self._round + 1
        return TransferReport(
            transport=self.backend,
            path=self.path,
            round=number,
            scope=getattr(self.source, "scope", "full"),
            parameters=len(self.metadata),
            bytes=self.total_bytes,
            seconds=seconds,
            label=label,
            revision={},
            previous=None,
            ranks=(RankReport(rank=f"trainer rank {self.rank}", bytes=sent, seconds=seconds),),
            reinitialised=reinitialised,
        )

    def _call(self, call: Callable[[], None], deadline: Deadline) -> None:
        """Have rank 0 call the server, and every rank hear how it went."""

        def step() -> dict[str, Any]:
            if self.is_sender:
                with self.explained():
                    call()
            return {}

        self._group.together(step, deadline)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Have what is raised say what a server needs, where that may be the reason."""
        try:
            yield
        except Exception as error:
            told = describe(error, transport=self.backend)
            if any(symptom in told.message for symptom in self.symptoms) and self.needs not in told.message:
                told.message += f" ({self.needs})"
            if told is error:
                raise
            raise told from error

    def _give_up(self, error: BaseException, deadline: Deadline) -> None:
        """Ask the server to drop the update; a stock one cannot, and may stay with some new and some old weights."""
        self._initialised, self._failed = False, True
        self.disconnect(error=error)
        if self.is_sender:
            abort = ControlCall(lambda: self.control.abort(5.0), deadline, what="abort_weight_update")
            abort.conclude()
            abort.linger()

    # The rest

    def shutdown(self) -> None:
        """Send no more; the server goes on serving what it has. Idempotent."""
        self._initialised, self._closed = False, True
        self.disconnect()

    @contextmanager
    def _timed(self, phase: str, seconds: dict[str, float]) -> Iterator[None]:
        self.tell(ProgressEvent(phase=phase, parameters=len(self.metadata)))
        began = time.perf_counter()
        yield
        seconds[phase] = time.perf_counter() - began

    def tell(self, event: ProgressEvent) -> None:
        """Report a step, on the calling thread."""
        if self.on_progress is not None:
            self.on_progress(event)
