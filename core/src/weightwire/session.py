"""Which call a worker may take now, and what it answered before.

The update is `none`, `open` (started), `receiving` (a message is being worked on) or `committing` (finish is). One
thread at a time works; it holds the session *busy*. Others that come meanwhile are judged at once:

    none       --start-->      open
    open       --update-->     receiving  --ok-->  open        --error-->  none
    open       --finish-->     committing --ok or error-->     none
    open       --abort-->      none       (what was staged is dropped)
    receiving  --abort-->      the working thread is cancelled, then none
    any        --init-->       as abort, then the new link

A call that carries an update id may be repeated: while the first is working the repetition waits for it, afterwards
it gets the same answer. The last 16 updates are remembered.
"""

from __future__ import annotations

import copy
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from weightwire.deadline import Deadline
from weightwire.errors import (
    Busy,
    DeadlineExceeded,
    MessageError,
    NotInitialised,
    OrderError,
    Superseded,
    TransferAborted,
    WeightwireError,
    describe,
)

UpdateState = Literal["none", "open", "receiving", "committing"]

REMEMBERED_UPDATES = 16
_TAKEOVER_SECONDS = 5.0
_BRIEF = ("init", "housekeeping")
"""What a call waits for, because it is over soon and decides whether the call fits."""


@dataclass(frozen=True, slots=True)
class Revision:
    """Identity of the weights a worker holds: equal revisions mean equal bytes.

    Attributes:
        lineage: 128 random bits in hex; anything that moves weights outside a trainer's chain starts a new one.
        number: Position in the lineage.
    """

    lineage: str
    number: int

    @classmethod
    def fresh(cls) -> Revision:
        """The first revision of a new lineage."""
        return cls(secrets.token_hex(16), 0)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Revision:
        """Read what `to_json` wrote.

        Raises:
            MessageError: Anything else.
        """
        lineage, number = record.get("lineage"), record.get("number")
        if set(record) != {"lineage", "number"} or not isinstance(lineage, str) or type(number) is not int:
            raise MessageError(f"a revision has a lineage and a number, got {dict(record)!r}")
        return cls(lineage, number)

    def to_json(self) -> dict[str, Any]:
        """The revision as JSON types."""
        return {"lineage": self.lineage, "number": self.number}


@dataclass(slots=True)
class Answer:
    """What a repeated call gets: the first one's error, or None for success."""

    error: BaseException | None = None
    known: bool = False

    def replay(self) -> None:
        """Raise what the first call raised, if it did."""
        if self.error is not None:
            raise self.error


def _without_traceback(error: BaseException) -> BaseException:
    """An error to keep: the one that was raised holds, through its frames, all that the failed call had in hand."""
    if isinstance(error, WeightwireError):
        return type(error).from_json(error.to_json())
    try:
        return copy.copy(error)
    except TypeError:  # a class that its arguments alone do not make
        return RuntimeError(f"{type(error).__name__}: {error}")


class UpdateSession:
    """The state machine above.

    Args:
        linked: Tells whether the worker is initialised.
    """

    def __init__(self, linked: Callable[[], bool]) -> None:
        self._linked = linked
        self._condition = threading.Condition()
        self._busy: str | None = None
        self._busy_key: tuple[str, int | None] | None = None
        self._running: Deadline | None = None
        self._open = False
        self._update_id: str | None = None
        self._lease: Deadline | None = None
        self._answers: OrderedDict[str, dict[tuple[str, int | None], BaseException | None]] = OrderedDict()
        self._ended: dict[str, BaseException] = {}

    @property
    def update(self) -> UpdateState:
        """State of the update."""
        if self._busy == "update":
            return "receiving"
        if self._busy == "finish":
            return "committing"
        return "open" if self._open else "none"

    @property
    def update_id(self) -> str | None:
        """Id of the update that is on, if it has one."""
        return self._update_id if self._open else None

    @property
    def idle(self) -> bool:
        """Whether no update is on and nobody is working."""
        return not self._open and self._busy is None

    @property
    def lease_expired(self) -> bool:
        """Whether an open update's trainer has been silent past the deadline of its start."""
        lease = self._lease
        return self._open and self._busy is None and lease is not None and lease.remaining() == 0

    def committed(self, update_id: str | None) -> bool:
        """Whether the update of that id has committed."""
        answers = self._answers.get(update_id or "", {})
        return ("finish", None) in answers and answers["finish", None] is None

    @contextmanager
    def initialising(self, deadline: Deadline, *, reason: str) -> Iterator[bool]:
        """Hold the session for an init; yields whether an open update has to be dropped.

        Raises:
            Busy: A receiving thread did not let go within 5 s.
        """
        with self._condition:
            if self._busy == "update" and self._running is not None:
                self._running.cancel(Superseded(f"the update was ended: {reason}"))
                limit = Deadline(min(_TAKEOVER_SECONDS, deadline.remaining()), what="the running update to end")
                try:
                    limit.wait_for(lambda: self._busy is None, self._condition)
                except DeadlineExceeded as error:
                    raise Busy("a running update did not end within 5 s; try again") from error
            deadline.wait_for(lambda: self._busy is None, self._condition, "the worker to become free")
            had_update = self._open
            if had_update:
                self._end(Superseded(f"the update was ended: {reason}"))
            self._busy = "init"
        try:
            yield had_update
        finally:
            self._release()

    @contextmanager
    def exclusive(self, what: str, deadline: Deadline, *, after_commit: bool = False) -> Iterator[None]:
        """Hold the session for a call that must not meet an update (shutdown, label, reset).

        Args:
            what: The call, in words for messages.
            deadline: How long to wait for a call that is no update, an init say.
            after_commit: Wait for an update that is committing instead of refusing.

        Raises:
            OrderError: An update is on.
        """

        def free() -> bool:
            if self._open and not (after_commit and self._busy == "finish"):
                raise OrderError(f"{what} is not possible while an update is {self.update}: finish or abort it first")
            return self._busy is None

        with self._condition:
            deadline.wait_for(free, self._condition, "the worker to become free")
            self._busy = what
        try:
            yield
        finally:
            self._release()

    @contextmanager
    def if_idle(self) -> Iterator[bool]:
        """Hold the session if no update is on and nobody works; yields whether it does, without waiting."""
        with self._condition:
            idle = self.idle
            if idle:
                self._busy = "housekeeping"
        try:
            yield idle
        finally:
            if idle:
                self._release()

    @contextmanager
    def starting(self, update_id: str | None, lease: Deadline) -> Iterator[Answer]:
        """Open an update; the answer is known where this id has it open already.

        Raises:
            OrderError: Not initialised, or another update is on.
        """
        with self._condition:

            def soon_decided() -> bool:
                same = update_id is not None and update_id == self._update_id
                return not (self._busy in _BRIEF or (self._busy == "start" and same))

            lease.wait_for(soon_decided, self._condition, "the worker to become free")
            self._refuse_ended(update_id)
            if self._open or self._busy is not None:
                if update_id is not None and update_id == self._update_id and self._open and self._busy != "finish":
                    yield Answer(known=True)
                    return
                raise OrderError(f"start_weight_update while an update is {self.update}: finish or abort it first")
            if update_id is not None and update_id in self._answers:
                raise OrderError(f"update {update_id} is over; start one with a new id")
            if not self._linked():
                raise NotInitialised("start_weight_update before init_weight_transfer_engine: initialise first")
            self._busy, self._open = "start", True
            self._update_id, self._lease = update_id, lease
        try:
            yield Answer()
        except BaseException as error:
            with self._condition:
                self._end(error)
            raise
        finally:
            self._release()

    @contextmanager
    def working(
        self,
        call: Literal["update", "finish"],
        update_id: str | None,
        sequence: int | None,
        deadline: Deadline,
    ) -> Iterator[Answer]:
        """Hold the session for one update message or the finish.

        Raises:
            OrderError: The call does not fit; `Superseded` where another trainer took over.
        """
        key = (call, sequence)
        answer = self._enter(key, update_id, deadline)
        if answer.known:
            yield answer
            return
        error: BaseException | None = None
        try:
            yield answer
        except BaseException as raised:
            error = raised
            raise
        finally:
            with self._condition:
                self._remember(update_id, key, error)
                if self._lease is not None and deadline.remaining() > self._lease.remaining():
                    self._lease = deadline  # its trainer gave this message more time
                if call == "finish" or error is not None:
                    self._end(error)
            self._release()

    def _enter(self, key: tuple[str, int | None], update_id: str | None, deadline: Deadline) -> Answer:
        call = "update_weights" if key[0] == "update" else "finish_weight_update"
        with self._condition:
            deadline.wait_for(lambda: self._busy not in _BRIEF, self._condition, "the worker to become free")
            repeated = update_id is not None and update_id == self._update_id and key != ("update", None)
            if repeated and self._busy_key == key:
                deadline.wait_for(lambda: self._busy_key != key, self._condition, f"the first {call} to end")
            answers = self._answers.get(update_id or "", {})
            if key in answers:
                return Answer(error=answers[key], known=True)
            self._refuse_ended(update_id)
            if self._busy is not None:
                raise OrderError(f"{call} while the worker is busy with {self._busy}")
            if not self._open:
                raise OrderError(f"{call} without start_weight_update: start an update first")
            if update_id is not None and self._update_id is not None and update_id != self._update_id:
                raise OrderError(f"{call} for update {update_id} while update {self._update_id} is open")
            self._busy, self._busy_key, self._running = key[0], key, deadline
            return Answer()

    def abort(
        self, update_id: str | None, deadline: Deadline, drop: Callable[[], None], *, reason: TransferAborted
    ) -> bool:
        """End the update, if one is on; returns whether there was one.

        Args:
            update_id: Id of the update to end; None ends whichever is on.
            deadline: How long a working thread may take to let go.
            drop: Drops what is staged; called with the session held, only when no thread was working.
            reason: What a working thread raises, and later calls for that update are told.

        Raises:
            OrderError: It is committing or has committed.
            DeadlineExceeded: The working thread did not let go.
        """
        met: tuple[str | None] | None = None
        while True:
            with self._condition:
                if self.committed(update_id):
                    raise OrderError(f"update {update_id} has committed: it is too late to abort it")
                other = update_id is not None and self._update_id not in (None, update_id)
                if not self._open or other or met not in (None, (self._update_id,)):
                    return met is not None
                if self._busy == "finish":
                    raise OrderError("the update is committing: it is too late to abort it")
                met = (self._update_id,)
                if self._busy is not None:
                    if self._running is not None:
                        self._running.cancel(reason)
                    deadline.wait_for(lambda: self._busy is None, self._condition, "the running update to let go")
                    # A message that ended well just before it heard leaves the update open.
                    continue
            if self.drop_open(drop, reason):
                return True

    def drop_open(self, drop: Callable[[], None], reason: TransferAborted) -> bool:
        """End an open update that nobody works on; returns whether there was one. Never waits."""
        with self._condition:
            if not self._open or self._busy is not None:
                return False
            self._busy = "abort"
        try:
            drop()
        finally:
            with self._condition:
                self._end(reason)
            self._release()
        return True

    def _end(self, error: BaseException | None) -> None:
        if self._update_id is not None and error is not None:
            self._ended[self._update_id] = _without_traceback(error)
            self._answers.setdefault(self._update_id, {})
            self._forget_oldest()
        self._open, self._lease, self._update_id = False, None, None

    def _refuse_ended(self, update_id: str | None) -> None:
        ended = self._ended.get(update_id or "")
        if isinstance(ended, Superseded):
            raise Superseded(f"update {update_id} was superseded: another trainer took this worker over")
        if ended is not None:
            raise OrderError(f"update {update_id} is over: {describe(ended).message}")

    def _remember(self, update_id: str | None, key: tuple[str, int | None], error: BaseException | None) -> None:
        if update_id is None or key == ("update", None):  # nothing tells a repetition from a second message
            return
        self._answers.setdefault(update_id, {})[key] = None if error is None else _without_traceback(error)
        self._answers.move_to_end(update_id)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self._answers) > REMEMBERED_UPDATES:
            forgotten, _ = self._answers.popitem(last=False)
            self._ended.pop(forgotten, None)

    def _release(self) -> None:
        with self._condition:
            self._busy = self._busy_key = self._running = None
            self._condition.notify_all()
