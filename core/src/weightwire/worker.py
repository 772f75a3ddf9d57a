"""One rank that serves a model and takes new weights for it.

A Worker is the only owner of sink, session, gate, revision and engine. A host (the worker server, vLLM's adapter,
`LocalClient`) translates its calls to the methods here and holds no state of its own. Every method may be called from
any thread; calls that only ask or control never wait for a running transfer.

Four independent facts make up the state: `link` (is a trainer connected), `update` (see session.py), `weights` (whole,
or torn by an in-place update that failed half-way) and the gate.
"""

from __future__ import annotations

import time
from typing import Any

from weightwire.connection import Connection, parse_link
from weightwire.deadline import Deadline
from weightwire.engine import WeightTransferEngine
from weightwire.errors import (
    DeadlineExceeded,
    OrderError,
    Superseded,
    TransferAborted,
    Unsupported,
    WeightsTorn,
)
from weightwire.gate import Gate, Hold, PauseMode
from weightwire.messages import ParallelConfig
from weightwire.round import CommitPolicy, Round
from weightwire.session import Revision, UpdateSession
from weightwire.sink import Held, as_sink
from weightwire.target import Target

ABORT_SECONDS = 10.0


class Worker:
    """Serves one model and takes new weights for it.

    Args:
        model: An `nn.Module`, an object with `load_weights`, or a `WeightSink`.
        backend: The transport to take; None takes the one the trainer names.
        parallel_config: Where this rank stands among the ranks of its server.
        staging: `"staged"` keeps the old weights serving until commit; `"in_place"` needs no second copy of the model
            and refuses readers meanwhile.
        strict: Refuse updates with unknown or missing names.
        cast: Convert other dtypes instead of refusing them.
        commit: `"swap"` rebinds storage; `"copy"` keeps addresses.
        commit_policy: See `Round`.
        draft_model: A second model with revision and label of its own.
    """

    def __init__(
        self,
        model: Any,
        *,
        backend: str | None = None,
        parallel_config: Any = None,
        staging: str = "staged",
        strict: bool = True,
        cast: bool = False,
        commit: str = "swap",
        commit_policy: CommitPolicy = "all",
        draft_model: Any = None,
    ) -> None:
        options: dict[str, Any] = {"staging": staging, "strict": strict, "cast": cast, "commit": commit}
        self._main = Target(model, as_sink(model, **options))
        self._draft = None if draft_model is None else Target(draft_model, as_sink(draft_model, **options))
        self._target = self._main
        self._commit_policy = commit_policy
        self.parallel_config = parallel_config or ParallelConfig()
        self.gate = Gate()
        self.session = UpdateSession(lambda: self.linked)
        self._connection = Connection(model, backend=backend, parallel_config=self.parallel_config)
        self._round: Round | None = None
        self._last_transfer: dict[str, float] | None = None
        self._update_state()

    def take_draft_model(self, model: Any) -> None:
        """Have draft updates go to `model` from now on; nothing to do where they already do.

        Raises:
            OrderError: An update is on.
        """
        if self._draft is not None and self._draft.model is model:
            return
        with self.session.exclusive("a new draft model", Deadline(ABORT_SECONDS)):
            self._draft = Target(model, as_sink(model))

    # What is known

    @property
    def linked(self) -> bool:
        """Whether a trainer is connected."""
        return self._connection.linked

    @property
    def torn(self) -> bool:
        """Whether the weights are half old, half new."""
        return self._main.torn or (self._draft is not None and self._draft.torn)

    @property
    def state(self) -> str:
        """`"updating"`, `"torn"`, `"uninitialised"` or `"ready"`."""
        if self.session.update != "none":
            return "updating"
        if self.torn:
            return "torn"
        return "ready" if self.linked else "uninitialised"

    @property
    def weight_version(self) -> str:
        """The label of the weights that serve."""
        return self._main.label

    @property
    def world_size(self) -> int:
        """Ranks of this server, all data-parallel replicas together."""
        return int(self.parallel_config.world_size_across_dp)

    def info(self) -> dict[str, Any]:
        """State, label, revision and the rest as JSON types; never waits."""
        self._sweep()
        return {
            "weight_version": self._main.label,
            "revision": self._main.revision.to_json(),
            "state": self.state,
            "update": self.session.update,
            "update_id": self.session.update_id,
            "weights": "torn" if self.torn else "whole",
            "link": "up" if self.linked else "down",
            "gate": f"paused({self.gate.mode})" if self.gate.paused else "open",
            "backend": self._connection.backend,
            "rank": self.parallel_config.rank,
            "world_size": self.world_size,
            "cast": self._main.sink.cast,
            "last_transfer": self._last_transfer,
        }

    def inventory(self, *, deadline: Deadline | None = None) -> list[Held]:
        """What an update may bring; empty for a model that loads by itself and does not tell."""
        with self.gate.reading(deadline=deadline, ignore_pause=True):
            return self._main.sink.inventory()

    # The trainer's calls

    def init(self, init_info: dict[str, Any], *, deadline: Deadline | None = None) -> None:
        """Connect to the trainer that sent `init_info`; an older link is closed, an open update dropped.

        Raises:
            MessageError: Unknown, missing or mistyped keys.
            OrderError: Another trainer is connected and alive, and `takeover` was not asked for.
            HandshakeError: The two sides expect different things.
            PeerLost, DeadlineExceeded: The fleet did not come together.
        """
        deadline = deadline or Deadline(what="init_weight_transfer_engine")
        info = parse_link(init_info)
        foreign = self._connection.foreign(info)
        reason = "another trainer took over" if foreign else "the trainer initialised again"
        with self.session.initialising(deadline, reason=reason) as had_update:
            if had_update:
                self._drop(Superseded(reason))
            engine = self._connection.open(init_info, info, deadline)
        if engine.link is not None:
            engine.link.rendezvous.when_dead(self._link_ended)

    def start(self, *, update_id: str | None = None, draft: bool = False, deadline: Deadline | None = None) -> None:
        """Open an update; `deadline` is the lease after which a silent trainer loses it.

        Raises:
            OrderError: Not initialised, or another update is on.
            Unsupported: A draft update over a transport that has none.
        """
        self._sweep()
        lease = deadline or Deadline(what="the update")
        with self.session.starting(update_id, lease) as answer:
            if answer.known:
                return
            engine = self._engine
            self._choose_target(engine, draft=draft)
            self._round = Round(
                engine,
                self._target.sink,
                gate=self.gate,
                held=self._target.revision,
                full_only=self._target.torn,
                commit_policy=self._commit_policy,
            )
            engine.start_weight_update()
            self._update_state()

    def _choose_target(self, engine: WeightTransferEngine[Any, Any], *, draft: bool) -> None:
        if not draft:
            self._target = self._main
            engine.reset_weight_update_target()
            return
        if not engine.supports_draft_weight_update:
            raise Unsupported(f"backend {engine.backend!r} cannot update a draft model")
        if self._draft is None:
            raise OrderError("start_draft_weight_update: this worker has no draft model")
        self._target = self._draft
        engine.set_weight_update_target(self._draft.model, None)

    def update(
        self,
        update_info: dict[str, Any],
        *,
        update_id: str | None = None,
        sequence: int | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Receive one message of the open update.

        Raises:
            UpdateRefused, HandshakeError: Nothing moved; the update is over.
            TransferError: The transfer failed; what came is dropped, the link is down.
            OrderError: No update is open.
        """
        self._sweep()
        deadline = deadline or Deadline(what="update_weights")
        with self.session.working("update", update_id, sequence, deadline) as answer:
            if answer.known:
                answer.replay()
                return
            assert self._round is not None
            try:
                typed = self._engine.parse_update_info(update_info)
                self._round.receive(typed, deadline)
            except BaseException as error:
                self._drop(error)
                raise
            finally:
                self._update_state()

    def finish(
        self,
        weight_version: str | None = None,
        *,
        update_id: str | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Commit the open update, if every rank of the fleet can; `weight_version` becomes the label.

        Raises:
            WeightwireError: Why nobody commits; the update is over and the old weights serve.
        """
        self._sweep()
        deadline = deadline or Deadline(what="finish_weight_update")
        with self.session.working("finish", update_id, None, deadline) as answer:
            if answer.known:
                answer.replay()
                return
            current, target = self._round, self._target
            assert current is not None
            try:
                commit = current.settle(deadline)
            except BaseException as error:
                self._drop(error)
                raise
            finally:
                self._update_state()
            self._round = None
            self._last_transfer = {"bytes": current.bytes, "seconds": current.age, "at": time.time()}
            target.zeroed = False
            target.revision = current.revision or Revision.fresh()
            if weight_version is not None:
                target.label = weight_version
            self._engine.reset_weight_update_target()
            self._target = self._main
            self._update_state()
            current.report(commit)

    def abort(self, *, update_id: str | None = None, deadline: Deadline | None = None) -> bool:
        """End the update that is on and drop what it brought; returns whether there was one.

        Raises:
            OrderError: It is committing or has committed.
            DeadlineExceeded: The receiving thread did not let go.
        """
        self._sweep()
        deadline = deadline or Deadline(ABORT_SECONDS, what="abort_weight_update")
        reason = TransferAborted("the update was aborted by abort_weight_update")
        try:
            return self.session.abort(update_id, deadline, lambda: self._drop(reason, heard=True), reason=reason)
        except DeadlineExceeded:
            # The thread that works is stuck in the data plane; without it the thread comes back by itself.
            self._connection.lost()
            if (engine := self._connection.engine) is not None:
                engine.failed(reason)
            raise

    def shutdown(self, *, deadline: Deadline | None = None) -> None:
        """Leave the trainer; the model goes on serving what it has.

        Raises:
            OrderError: An update is on.
        """
        self._sweep()
        deadline = deadline or Deadline(ABORT_SECONDS, what="shutdown_weight_transfer_engine")
        with self.session.exclusive("shutdown_weight_transfer_engine", deadline):
            self._connection.close()

    # The readers' and the operator's calls

    def reading(self) -> Hold:
        """Hold the weights still while a forward pass or an answer runs: `with` or `async with`.

        Raises:
            Paused: The gate was paused with mode wait or abort.
            WeightsTorn: The weights are half old, half new.
        """
        return self.gate.reading()

    def pause(self, mode: PauseMode = "abort", *, deadline: Deadline | None = None) -> None:
        """Keep readers out; returns when nobody reads. `"keep"` makes new ones wait, the others refuse them."""
        self.gate.pause(mode, deadline=deadline)

    def resume(self) -> None:
        """Let readers in again.

        Raises:
            OrderError: The weights are torn: only a full update makes them fit to read.
        """
        if self.torn:
            raise OrderError("resume while the weights are torn: push a full update first")
        self.gate.resume()

    @property
    def is_paused(self) -> bool:
        """Whether the gate is paused."""
        return self.gate.paused

    def set_weight_version(self, weight_version: str) -> None:
        """Set the label alone.

        Raises:
            OrderError: An update is on, or the weights are torn.
        """
        if self.torn:
            raise OrderError("update_weight_version while the weights are torn: push a full update first")
        with self.session.exclusive("update_weight_version", Deadline(ABORT_SECONDS)):
            self._main.label = weight_version

    def checksums(self, *, deadline: Deadline | None = None) -> dict[str, str]:
        """SHA-256 in hex of the live bytes of every parameter and persistent buffer.

        Raises:
            OrderError: The weights are torn.
        """
        if self.torn:
            raise OrderError("weight_checker checksum while the weights are torn: push a full update first")
        with self.gate.reading(deadline=deadline, ignore_pause=True):
            return self._main.sink.checksums()

    def reset(self, *, deadline: Deadline | None = None) -> None:
        """Fill every parameter with zeros; the weights count as torn until a full update.

        Raises:
            OrderError: An update is on.
        """
        deadline = deadline or Deadline(ABORT_SECONDS, what="weight_checker reset")
        alone = self.session.exclusive("weight_checker reset", deadline, after_commit=True)
        with alone, self.gate.exclusive(deadline):
            self._main.sink.reset()
            self._main.zeroed = True
            self._main.revision = Revision.fresh()
        self._update_state()

    # Housekeeping

    @property
    def _engine(self) -> WeightTransferEngine[Any, Any]:
        engine = self._connection.engine
        assert engine is not None, "an update is opened over a link"
        return engine

    def _drop(self, error: BaseException, *, heard: bool = False) -> None:
        current, self._round = self._round, None
        if current is not None and not current.abort(error, heard=heard):
            self._connection.lost()
        if (engine := self._connection.engine) is not None:
            engine.reset_weight_update_target()
        self._target = self._main
        self._update_state()

    def _sweep(self) -> None:
        """End an update whose trainer has been silent past its lease, or whose link has died."""
        if self.session.lease_expired:
            reason = "its trainer was silent past the deadline of start_weight_update"
        elif self.session.update == "open" and not self.linked:
            reason = self._connection.end
        else:
            return
        error = TransferAborted(f"the update was dropped: {reason}")
        self.session.drop_open(lambda: self._drop(error, heard=True), error)

    def _link_ended(self) -> None:
        """The trainer is gone: let go of what its link held. A call that is at work does so itself."""
        self._sweep()
        with self.session.if_idle() as idle:
            if idle and (engine := self._connection.engine) is not None:
                engine.release()

    def _update_state(self) -> None:
        """Keep readers out where the live weights are not fit to read."""
        if self.torn:
            self.gate.block(lambda: WeightsTorn("the weights are torn: only a full update makes them whole again"))
        elif self._round is None or not self._round.writes_live:
            self.gate.block(None)
