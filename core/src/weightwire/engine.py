"""The worker's side of a transport.

A transport subclasses `WeightTransferEngine` and writes three methods: `connect` (build the data plane),
`receive_weights` (put one message's bytes into `self.sink`) and `disconnect`. Everything that is the same for all
transports is here or in `Round`: joining the trainer, comparing plans, starting a round, voting.

Who calls what, in order (W: a Worker drives; B: the engine is used bare, as the reference allows):

    1. init_transfer_engine     W, B   join, hello, plan, connect, connected
    2. start_weight_update      W, B
    3. update_weights           B      begin-n on the first message, then receive_weights
       receive_weights          W      the Worker's Round has done begin-n
    4. finish_weight_update     W, B   drains; bare, it also votes and commits
    5. shutdown                 W, B

An engine written for the reference's contract, overriding these methods themselves, works too: it then has no link,
and the Worker commits what it loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch

from weightwire.deadline import Deadline
from weightwire.errors import HandshakeError, TransferError, Unsupported, WeightwireError
from weightwire.layout import ParamMeta, total_bytes
from weightwire.link import Link, parse_metadata
from weightwire.load_plan import LoadPlan
from weightwire.load_plan_exchange import KnownPlans
from weightwire.messages import (
    ParallelConfig,
    WeightTransferConfig,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from weightwire.plan_building import plan_of_boxes
from weightwire.round import Round
from weightwire.sink import UpdateSpec, WeightSink, as_sink

TInitInfo = TypeVar("TInitInfo", bound=WeightTransferInitInfo)
TUpdateInfo = TypeVar("TUpdateInfo", bound=WeightTransferUpdateInfo)


class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    """Receives a model's weights over one transport.

    Args:
        config: Holds the backend name.
        vllm_config: Anything with `parallel_config` and `model_config`; None for a process on its own.
        device: Where the model lives.
        model: The model that receives the weights, or a `WeightSink`.
    """

    init_info_cls: type[TInitInfo]
    update_info_cls: type[TUpdateInfo]

    supports_draft_weight_update: bool = True
    defers_processing: bool = False
    """Whether `receive_weights` may return before the bytes are in the sink; then `drain_pending` waits for them."""

    wire_version: ClassVar[int] = 1

    needs_load_plans: ClassVar[bool] = False
    """Whether it plans from what all workers load: `load_plans` then holds one for each worker rank."""

    stock_needs: ClassVar[str] = ""
    """What stock vLLM trainers of this backend need on both sides, for an engine that therefore refuses them."""

    writes_after_failure: ClassVar[bool] = True
    """Whether a failed transfer may still write to what `WeightSink.targets` gave out, so that it is not used again."""

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.config = config
        self.vllm_config = vllm_config
        self.parallel_config: Any = getattr(vllm_config, "parallel_config", None) or ParallelConfig()
        self.model_config: Any = getattr(vllm_config, "model_config", None)
        self.device = device
        self.model = model
        self.link: Link | None = None
        self.driven = False
        self.load_plans: list[LoadPlan] = []
        self._known_plans = KnownPlans()
        self._default_model, self._default_model_config = model, self.model_config
        self._deadline: Deadline | None = None
        self._round: Round | None = None

    @property
    def backend(self) -> str:
        """Backend name, for messages."""
        return self.config.backend.rpartition(":")[2]

    @property
    def sink(self) -> WeightSink:
        """Where the weights of the present target go."""
        return as_sink(self.model)

    @property
    def worker_index(self) -> int:
        """This rank's place among the ranks of its server: `data_parallel_index * TP * PP + rank`."""
        parallel = self.parallel_config
        return int(getattr(parallel, "data_parallel_index", 0) * parallel.world_size + parallel.rank)

    @property
    def deadline(self) -> Deadline:
        """Deadline of the call that is running; a bare engine gets the default one."""
        return self._deadline or Deadline(what=f"{self.backend} weight transfer")

    def under(self, deadline: Deadline | None) -> None:
        """Have the calls that follow run under `deadline`."""
        self._deadline = deadline

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        """Set the model that receives the next update."""
        self.model, self.model_config = model, model_config

    def reset_weight_update_target(self) -> None:
        """Return to the model the engine was made with."""
        self.model, self.model_config = self._default_model, self._default_model_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> TInitInfo:
        """The typed init info.

        Raises:
            MessageError: "Invalid init_info for <class>: ..." naming the key.
        """
        return self.init_info_cls.parse(init_dict, what=f"init_info for {type(self).__name__}")

    def parse_update_info(self, update_dict: dict[str, Any]) -> TUpdateInfo:
        """The typed update info.

        Raises:
            MessageError: "Invalid update_info for <class>: ..." naming the key.
        """
        return self.update_info_cls.parse(update_dict, what=f"update_info for {type(self).__name__}")

    def init_transfer_engine(self, init_info: TInitInfo) -> None:
        """Join the trainer that sent `init_info` and build the data plane; an older link is closed first.

        Raises:
            Unsupported: The trainer is a stock vLLM one, and this engine cannot speak with it.
            HandshakeError: The two sides expect different things.
            PeerLost: A rank of the fleet died meanwhile.
            DeadlineExceeded: A rank did not come; it is named.
        """
        info = init_info.link
        if info is None and self.stock_needs:
            raise Unsupported(
                "the init_info has no key 'weightwire', so it comes from a stock vLLM trainer, whose "
                f"{self.backend} needs {self.stock_needs} on both sides; use weightwire's trainer engine",
                transport=self.backend,
            )
        self.shutdown()
        deadline = self.deadline
        if info is None:
            self.connect(init_info, deadline)
            return
        self.link = link = Link(info, index=self.worker_index, transport=self.backend, deadline=deadline)
        try:
            with link.watch(deadline):
                link.hello(deadline, distribution=type(self).__module__.partition(".")[0], payload=self.describe())
                if self.needs_load_plans:
                    self._exchange_load_plans(link, deadline)
                self._agree_on_plan(link, init_info, deadline)
                self._connect(link, init_info, deadline)
                link.connected(deadline)
        except BaseException:
            self.shutdown()
            raise

    def _exchange_load_plans(self, link: Link, deadline: Deadline) -> None:
        own, error = None, None
        try:
            # A trainer that declares nothing says with each update what it is of.
            own = self.sink.load_plan(link.metadata) if link.metadata else plan_of_boxes(())
        except WeightwireError as refusal:
            error = refusal
        try:
            self.load_plans = self._known_plans.exchange(link.rendezvous, deadline, own, error=error)
        except HandshakeError as broken:
            # What another rank posted cannot be read here, and the next phase is where the others are.
            link.fail(broken)
            raise

    def _agree_on_plan(self, link: Link, init_info: TInitInfo, deadline: Deadline) -> None:
        digest, error = "", None
        try:
            digest = self.plan_digest(init_info)
        except WeightwireError as refusal:  # the others hear why, instead of that this rank has left
            error = refusal
        link.agree_on_plan(digest, deadline, error=error)

    def _connect(self, link: Link, init_info: TInitInfo, deadline: Deadline) -> None:
        try:
            self.connect(init_info, deadline)
        except BaseException as error:
            # The others are busy connecting to this rank: only a push reaches them there.
            link.fail(error)
            raise

    def describe(self) -> dict[str, Any]:
        """What this worker says of itself in hello."""
        return {**self.sink.describe(), "device": str(self.device)}

    def plan_digest(self, init_info: TInitInfo) -> str:
        """Digest of what this transport derives from metadata; compared with the trainers' before connecting."""
        return ""

    def update_spec(self, update_info: TUpdateInfo) -> UpdateSpec:
        """Which parameters this update brings: those named in it, else those of init.

        Raises:
            TransferError: Neither names any.
        """
        return UpdateSpec(metadata=self.update_metadata(update_info), scope=update_info.scope)

    def check_update(self, spec: UpdateSpec) -> None:
        """Look once more whether this update can be, after the sink has begun it and before a byte moves.

        Raises:
            WeightwireError: Every rank of the fleet hears why not.
        """

    def standing(self, spec: UpdateSpec) -> dict[str, Any]:
        """What this worker says of itself, as JSON, beside the revision it holds, before a byte of an update moves."""
        return {}

    def update_bytes(self, spec: UpdateSpec) -> int:
        """How many bytes of tensors an update brings to this rank."""
        if self.link is not None and spec.metadata is self.link.metadata:
            return self.link.total_bytes
        return total_bytes(spec.metadata)

    def update_metadata(self, update_info: TUpdateInfo) -> tuple[ParamMeta, ...]:
        """The parameters this update brings, in the order in which they travel."""
        if update_info.metadata is not None:
            return parse_metadata(update_info.metadata)
        return self._require_link().metadata

    def _require_link(self) -> Link:
        if self.link is None:
            raise self.not_initialised()
        return self.link

    def not_initialised(self) -> TransferError:
        """The error for a transfer before `init_transfer_engine`."""
        return TransferError(
            f"{type(self).__name__} is not initialized: call init_transfer_engine first",
            transport=self.backend,
        )

    def start_weight_update(self) -> None:
        """Prepare for a new update."""
        if not self.driven:
            self._round = Round(self, self.sink)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one update message (a bare engine's entry; a Worker goes through its own `Round`)."""
        typed = self.parse_update_info(update_info)
        if self.driven or self._round is None:
            self.receive_weights(typed)
        else:
            self._bare(lambda current, deadline: current.receive(typed, deadline))
        if not self.defers_processing and torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Wait until every byte of the update is here; a bare engine then votes and commits."""
        self.drain_pending()
        if not self.driven and self._round is not None:
            self._bare(lambda current, deadline: current.report(current.settle(deadline)))
            self._round = None

    def _bare(self, step: Callable[[Round, Deadline], object]) -> None:
        """Do one step of the round as a Worker would, and drop the round when it fails."""
        assert self._round is not None
        current, deadline = self._round, self.deadline
        self.driven = True
        try:
            step(current, deadline)
        except BaseException as error:
            self._round = None
            current.abort(error)
            raise
        finally:
            self.driven = False

    def drain_pending(self) -> None:
        """Wait until everything deferred is in the sink; idempotent, nothing to do by default."""

    def connect(self, init_info: TInitInfo, deadline: Deadline) -> None:
        """Build the data plane. `self.link` is there unless the trainer is a stock one."""
        raise NotImplementedError(f"{type(self).__name__} neither connects nor overrides init_transfer_engine")

    @abstractmethod
    def receive_weights(self, update_info: TUpdateInfo) -> None:
        """Receive the bytes of one message into `self.sink`, under `self.deadline`.

        Raises:
            TransferError: Not initialised, or the data plane failed.
        """

    def report_details(self) -> dict[str, Any]:
        """What this transport adds, as JSON, to what the trainer's report says of this rank's part in a round."""
        return {}

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Take the data plane down; with `error` it has failed and must not be waited for."""

    def release(self) -> None:
        """Take the data plane of a dead link down, from any thread; `shutdown` does the rest."""
        if self.link is not None and not self.link.alive:
            self.disconnect(error=self.link.rendezvous.failure)

    def shutdown(self) -> None:
        """Release the data plane and leave the link; idempotent, and init is possible again afterwards."""
        link, self.link = self.link, None
        failure = link.rendezvous.failure if link is not None else None
        self.disconnect(error=failure)
        if link is not None:
            link.close()

    def failed(self, error: BaseException) -> None:
        """The data plane failed with `error`: tell every rank, and take the link down."""
        link, self.link = self.link, None
        if link is not None:
            link.fail(error)
        self.disconnect(error=error)
        if link is not None:
            link.close()
