"""One update of one worker rank, from the first message to commit or abort.

    begin    the sink looks at names, shapes and dtypes; every rank of the fleet hears of a refusal; no byte moved yet
    receive  the transport puts bytes into the sink
    settle   drain, prepare, close the gate, vote; unanimous: commit; else abort
    abort    what was staged is dropped

Everything that can fail comes before the vote. A refusal that all ranks heard of (begin, vote) leaves the link up; any
other failure takes it down, since ranks may then be out of step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from weightwire import faults
from weightwire.deadline import Deadline
from weightwire.errors import PeerFailed, PeerLost, Superseded, UpdateRefused, WeightsTorn, WeightwireError, describe
from weightwire.gate import Gate
from weightwire.layout import metadata_digest
from weightwire.link import base_error
from weightwire.messages import WeightTransferUpdateInfo
from weightwire.session import Revision
from weightwire.sink import CommitReport, UpdateSpec, WeightSink

if TYPE_CHECKING:
    from weightwire.engine import WeightTransferEngine

CommitPolicy = Literal["all", "per_server"]


class Round:
    """One update.

    Args:
        engine: The transport.
        sink: Where the weights go.
        gate: The readers' gate; None where nobody reads.
        held: The revision this worker holds.
        full_only: Whether the weights it holds can only be replaced whole.
        commit_policy: `"all"` closes the gate before the vote, so that no two servers ever answer from different
            weights; `"per_server"` votes first, so that a slow reader holds up only its own server.
    """

    def __init__(
        self,
        engine: WeightTransferEngine[Any, Any],
        sink: WeightSink,
        *,
        gate: Gate | None = None,
        held: Revision | None = None,
        full_only: bool = False,
        commit_policy: CommitPolicy = "all",
    ) -> None:
        self._engine = engine
        self._sink = sink
        self._gate = gate
        self._held = held
        self._full_only = full_only
        self._commit_policy = commit_policy
        self.writes_live = False
        """Whether bytes go straight into the weights that serve, so that nobody may read."""
        self._begun = False
        self._heard = False
        self._moving = False
        self.number: int | None = None
        self.revision: Revision | None = None
        self.bytes = 0
        self._spec: UpdateSpec | None = None
        self.seconds: dict[str, float] = {}
        self._made = time.perf_counter()

    def receive(self, update_info: WeightTransferUpdateInfo, deadline: Deadline) -> None:
        """Begin with the first message, then have the transport receive this one.

        Raises:
            UpdateRefused: The model does not take these weights.
            HandshakeError: The update stands on weights this worker does not hold, or ranks disagree.
            TransferError: The data plane failed, or another rank did.
        """
        with self._watched(deadline):
            if not self._begun:
                self._begin(update_info, deadline)
                faults.reach("worker.begin")
            with self._timed("receive"):
                self._receive(update_info)
            faults.reach("worker.received")

    @property
    def age(self) -> float:
        """Seconds since the update was opened."""
        return time.perf_counter() - self._made

    def _receive(self, update_info: WeightTransferUpdateInfo) -> None:
        link = self._engine.link
        self._moving = True
        try:
            self._engine.receive_weights(update_info)
        except (PeerLost, PeerFailed) as raised:
            error = link.rendezvous.explain(raised) if link is not None else raised
            raise error from raised if error is not raised else raised.__cause__
        self._moving = False

    def _begin(self, update_info: WeightTransferUpdateInfo, deadline: Deadline) -> None:
        link = self._engine.link
        if link is not None and update_info.trainer not in (None, link.info.trainer):
            # Its start was taken, since that carries no name; the link is another trainer's and stays as it is.
            self._heard = True
            raise Superseded("another trainer took this worker over: pass takeover=True to take it back")
        spec = self._engine.update_spec(update_info)
        refusal: WeightwireError | None = None
        try:
            if (self._full_only or self._sink.torn) and spec.scope != "full":
                raise UpdateRefused("the weights here are torn: only a full update makes them whole again")
            if self._held is not None and (stale := base_error(update_info.base, self._held)):
                raise stale
            self._sink.begin(spec)
            self._engine.check_update(spec)
        except WeightwireError as error:
            refusal = error
        if update_info.revision is not None:
            self.revision = Revision.from_json(update_info.revision)
        self.number = update_info.round
        if link is not None and self.number is not None:
            agree = {
                "metadata": link.metadata_digest if spec.metadata is link.metadata else metadata_digest(spec.metadata),
                "scope": spec.scope,
                "revision": update_info.revision,
            }
            whole = self._held is not None and not (self._full_only or self._sink.torn)
            payload = {"revision": self._held.to_json() if self._held and whole else None}
            if refusal is None:
                payload |= self._engine.standing(spec)
            outcome = link.begin(self.number, deadline, agree=agree, error=refusal, payload=payload)
            self._heard = not outcome.unanimous
            outcome.raise_failed()
        if refusal is not None:
            raise refusal
        self._begun = True
        self._spec = spec
        self._keep_readers_out(deadline)

    def _keep_readers_out(self, deadline: Deadline) -> None:
        """An in-place update writes what readers read: refuse new ones and wait for the present ones."""
        if self._sink.staging != "in_place":
            return
        self.writes_live = True
        if self._gate is not None:
            self._gate.block(lambda: WeightsTorn("an in-place update is writing the weights"))
            with self._gate.exclusive(deadline.part(0.9, "the readers to finish")):
                pass

    def settle(self, deadline: Deadline) -> CommitReport:
        """Commit this round if every rank of the fleet can.

        Raises:
            WeightwireError: Why nobody commits, in the words of the rank that cannot.
        """
        refusal = self._prepared(deadline)
        if self._spec is not None:
            self.bytes = self._engine.update_bytes(self._spec)
        with ExitStack() as stack, self._watched(deadline):
            if self._commit_policy == "per_server":
                self._vote(deadline, refusal)
                self._close_gate(stack, deadline)
            else:
                if refusal is None:
                    refusal = self._gate_refusal(stack, deadline)
                self._vote(deadline, refusal)
            faults.reach("worker.voted")
            report = self._sink.commit()
        self.seconds["commit"] = report.seconds
        faults.reach("worker.committed")
        return report

    def _close_gate(self, stack: ExitStack, deadline: Deadline) -> None:
        if self._gate is not None:
            with self._timed("gate"):
                # Readers may take nine tenths of what is left; the rest is for the vote.
                stack.enter_context(self._gate.exclusive(deadline.part(0.9, "the readers to finish")))

    def _gate_refusal(self, stack: ExitStack, deadline: Deadline) -> WeightwireError | None:
        try:
            self._close_gate(stack, deadline)
        except WeightwireError as error:
            return error
        return None

    def _prepared(self, deadline: Deadline) -> WeightwireError | None:
        try:
            with self._watched(deadline), self._timed("prepare"):
                if not self._begun:
                    raise UpdateRefused("finish_weight_update without any update_weights: nothing was received")
                self._engine.finish_weight_update()
                self._sink.prepare()
        except WeightwireError as error:
            return error
        except (MemoryError, RuntimeError, ValueError, TypeError) as error:
            return describe(error, transport=self._engine.backend)
        faults.reach("worker.vote")
        return None

    def _vote(self, deadline: Deadline, refusal: WeightwireError | None) -> None:
        link = self._engine.link
        if link is None or self.number is None:
            if refusal is not None:
                raise refusal
            return
        with self._timed("vote"):
            outcome = link.vote(self.number, deadline, error=refusal)
            self._heard = not outcome.unanimous
            outcome.raise_failed()

    def report(self, commit: CommitReport) -> None:
        """Tell the trainers what this rank did; after commit."""
        link = self._engine.link
        if link is None or self.number is None:
            return
        details = {
            "swapped": commit.swapped,
            "copied": commit.copied,
            "patched": commit.patched,
            "adopted": commit.adopted,
            "allocated_bytes": commit.allocated_bytes,
            **self._engine.report_details(),
        }
        link.done(self.number, {"bytes": self.bytes, "seconds": self.seconds, "details": details})

    def abort(self, error: BaseException, *, heard: bool = False) -> bool:
        """Drop what was staged; returns whether the link is still up.

        Args:
            error: Why.
            heard: Whether every rank knows already, or no rank waits for this one. Otherwise the link goes down with
                `error`, and the staged storage with it, since late bytes may still arrive there.
        """
        # A stock trainer waits for no rank, so that only a broken data plane costs it the link.
        heard = heard or self._heard or (self._engine.link is None and not self._moving)
        if not heard:
            self._engine.failed(error)
        self._sink.abort(retire=not heard and self._engine.writes_after_failure)
        return heard

    @contextmanager
    def _watched(self, deadline: Deadline) -> Iterator[None]:
        link = self._engine.link
        self._engine.under(deadline)
        try:
            with link.watch(deadline) if link is not None else nullcontext():
                yield
        finally:
            self._engine.under(None)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began
