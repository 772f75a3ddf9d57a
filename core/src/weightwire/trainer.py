"""The trainer's side of a transport.

A transport subclasses `TrainerWeightTransferEngine` and writes `connect`, `transmit`, `disconnect` and what its
workers are told (`worker_init_info`). What is the same for all transports is here (agreeing that a round may start, the
control calls beside the data plane, the vote, the report, opening the link again once when it was lost between two
rounds) and in `TrainerLink`.

All trainer ranks call `trainer_init` and `send_weights`; rank 0 drives the control plane.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch

from weightwire.clients.protocol import PauseMode
from weightwire.control_call import ControlCall
from weightwire.deadline import Deadline
from weightwire.errors import (
    HandshakeError,
    NotInitialised,
    OrderError,
    PlanOutdated,
    TransferAborted,
    TransferError,
    Unsupported,
    WeightwireError,
)
from weightwire.layout import ParamMeta
from weightwire.report import TransferReport
from weightwire.session import Revision
from weightwire.sink import Scope
from weightwire.source_reader import PresentSource
from weightwire.trainer_link import TrainerLink, TTrainerInitInfo
from weightwire.trainer_round import TrainerRound


class TrainerWeightTransferEngine(TrainerLink[TTrainerInitInfo]):
    """Sends a model's weights over one transport. Made by `trainer_init`; its attributes are those of `TrainerLink`."""

    compares_standings: ClassVar[bool] = False
    """Whether what it sends depends on what each worker holds: `begun` then hears."""

    # What a transport writes

    def update_info(self) -> dict[str, Any]:
        """What this transport adds to each round's update message."""
        return {}

    def prepare_round(self) -> None:
        """Do what needs no worker, while the workers look whether they take what is coming.

        Raises:
            WeightwireError: The round cannot be; every rank hears of it, and the link stays.
        """

    def choose_workers(self) -> Collection[int] | None:
        """The worker ranks that take part in the coming round; None for all that are there."""
        return None

    def end_round(self) -> None:
        """Let go of what `prepare_round` has taken hold of: the round is over, however it ended."""

    @abstractmethod
    def transmit(self, number: int, deadline: Deadline) -> int:
        """Send this rank's part of round `number`; returns the tensor bytes sent.

        Every rank iterates `self.pairs()` or `self.batches()` to its end, also one that sends nothing, so that gathers
        line up. Tensors may be parameters; gradients are not recorded here.
        """

    @property
    def path(self) -> str:
        """The way the bytes take, for the report."""
        return self.backend

    @property
    def round_metadata(self) -> tuple[ParamMeta, ...]:
        """What the present round brings: by default what the source declares."""
        return self.metadata

    @property
    def scope(self) -> Scope:
        """`"partial"` where the present round brings only some of the model's parameters, as a source may say."""
        scope: Scope = getattr(self.source, "scope", "full")
        return scope

    @property
    def verified(self) -> bool:
        """Whether the present round proved that what the workers hold is what was sent."""
        return self.init_info.checksum

    def report_details(self) -> dict[str, Any]:
        """What this transport adds, as JSON, to what the report says of this rank's part in a round.

        Of one that reads local pieces: the bytes of the parameters that the source gathers all the same.
        """
        if self.consumes != "local":
            return {}
        gathered: dict[str, int] = getattr(self.source, "gathered", {})
        return {"gathered_bytes": sum(gathered.values())}

    def standing(self) -> dict[str, Any]:
        """What this rank says of itself, as JSON, as a round begins."""
        return {}

    def begun(self, standings: dict[int, Any]) -> None:
        """Hear what every member said of itself as the round began, by member rank; with `compares_standings` only.

        Beside what its engine adds with `standing`, there is the `revision`: of a worker the one that it holds, None
        if its weights can only be replaced whole, and of trainer rank 0 the one that the round makes.
        """

    # A round

    def _device(self) -> torch.device:
        """Where the source's tensors are; the CPU if it does not say."""
        device = getattr(self.source, "device", None)
        return device if isinstance(device, torch.device) else torch.device("cpu")

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
                    self._leave_out()
                    report = current.run(reinitialised=reinitialised)
            finally:
                self.end_round()
                # A worker may have committed what failed elsewhere: no other weights may have that revision.
                self.next_revision = Revision(self.next_revision.lineage, self.next_revision.number + 1)
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
        return report

    def _leave_out(self) -> None:
        chosen = self.choose_workers()
        if chosen is None or not self.is_sender or self.rendezvous is None:
            return
        if set(chosen) >= set(range(self.fleet.workers)):
            return
        members = {self.fleet.trainers + worker for worker in chosen}
        error = TransferAborted("this server is left out of the round")
        self.rendezvous.parting.part_from_others(members, error)

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
