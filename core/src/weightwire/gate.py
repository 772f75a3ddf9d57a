"""The readers' gate: a commit waits for readers, and readers wait for a commit.

A reader is whoever computes with the weights: a forward pass, a whole answer. It holds the gate meanwhile, and a
commit takes the gate for itself alone, so that no reader sees half of one revision and half of another.

The gate prefers the writer: from the moment a commit waits, new readers wait behind it. A hold belongs to its
*context* (`contextvars`), so taking it again is free and never waits: in the same thread, in the same asyncio task,
and in what these start with a copy of their context (`asyncio.create_task`, `asyncio.to_thread`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Literal, Self, get_args

from weightwire.deadline import Deadline
from weightwire.errors import Busy, DeadlineExceeded, Paused

PauseMode = Literal["keep", "wait", "abort"]
"""New readers wait; new readers are refused; new ones are refused and the present ones asked to end early."""

_SLICE = 0.05


class _Reader:
    """One hold, shared by all who took it again; `depth` says how often and is guarded by the gate's lock."""

    __slots__ = ("cancelled", "depth", "gate")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.depth = 1
        self.cancelled = False


_held: ContextVar[tuple[_Reader, ...]] = ContextVar("weightwire_held", default=())


def _forget(reader: _Reader) -> None:
    """Take `reader` out of this context, and any whose holds have all ended elsewhere."""
    _held.set(tuple(other for other in _held.get() if other is not reader and other.depth))


class Hold:
    """A hold on the gate, for one `with` or `async with` statement at a time."""

    __slots__ = ("_deadline", "_first", "_gate", "_ignore_pause", "_reader")

    def __init__(self, gate: Gate, deadline: Deadline | None, ignore_pause: bool) -> None:
        self._gate = gate
        self._deadline = deadline
        self._ignore_pause = ignore_pause
        self._reader: _Reader | None = None
        self._first = False

    @property
    def cancelled(self) -> bool:
        """Whether a pause with mode `"abort"` asks this reader to end early; look between the steps of an answer."""
        return self._reader is not None and self._reader.cancelled

    def __enter__(self) -> Self:
        if not self._enter():
            deadline = self._deadline or Deadline(what="the readers' gate to open")
            with self._gate._changed:
                deadline.wait_for(lambda: self._enter(locked=True), self._gate._changed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reader, self._reader = self._reader, None
        assert reader is not None, "a hold is left once"
        if self._first:
            _forget(reader)
        self._gate._leave(reader)

    async def __aenter__(self) -> Self:
        if not self._enter():
            deadline = self._deadline or Deadline(what="the readers' gate to open")
            with self._gate._waking() as wake:
                while not self._enter():
                    deadline.check()
                    # Set from the loop's own thread only, so nothing is lost between the test and the wait.
                    with suppress(TimeoutError):
                        await asyncio.wait_for(wake.wait(), min(_SLICE, deadline.remaining()))
                    wake.clear()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _enter(self, *, locked: bool = False) -> bool:
        assert self._reader is None, "a hold is entered once at a time"
        held = _held.get()
        reader = self._gate._admit(held, self._ignore_pause, locked=locked)
        if reader is None:
            return False
        self._reader, self._first = reader, reader not in held
        if self._first:
            _held.set((*held, reader))
        return True


class Gate:
    """Readers in company, a writer alone; any thread, any asyncio loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wakes: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._readers: set[_Reader] = set()
        self._closed = False
        self._mode: PauseMode | None = None
        self._blocked: Callable[[], BaseException] | None = None

    @property
    def mode(self) -> PauseMode | None:
        """How the gate is paused; None if it is not."""
        return self._mode

    @property
    def paused(self) -> bool:
        """Whether the gate is paused."""
        return self._mode is not None

    @property
    def readers(self) -> int:
        """How many hold the gate now."""
        return len(self._readers)

    def reading(self, *, deadline: Deadline | None = None, ignore_pause: bool = False) -> Hold:
        """A hold, taken by `with` or, without blocking the event loop, by `async with`.

        Args:
            deadline: How long to wait for a commit or a `"keep"` pause to end; the default one if None.
            ignore_pause: Read although paused, as for a checksum.

        Raises (on entering):
            Paused: The gate is paused with mode wait or abort.
            DeadlineExceeded: It did not open in time.
            BaseException: What `block` was given.
        """
        return Hold(self, deadline, ignore_pause)

    def pause(self, mode: PauseMode = "wait", *, deadline: Deadline | None = None) -> None:
        """Take no new readers; returns when nobody holds and no commit is on. A second pause changes the mode.

        Raises:
            ValueError: No such mode.
            DeadlineExceeded: Readers still hold; the gate stays paused.
            Busy: The caller itself holds the gate.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"pause mode {mode!r} is none of {', '.join(get_args(PauseMode))}")
        self._refuse_own_hold("pause")
        deadline = deadline or Deadline(what="the pause")
        with self._lock:
            self._mode = mode
            if mode == "abort":
                for reader in self._readers:
                    reader.cancelled = True
            self._notify()
            deadline.wait_for(lambda: not self._readers and not self._closed, self._changed, "the wait for readers")

    def resume(self) -> None:
        """Take readers again; nothing to do where the gate is not paused."""
        with self._lock:
            self._mode = None
            self._notify()

    def block(self, factory: Callable[[], BaseException] | None) -> None:
        """Have every new reader raise what `factory` makes, also those that wait now; None lets them in again."""
        with self._lock:
            self._blocked = factory
            self._notify()

    def close(self, deadline: Deadline) -> None:
        """Keep new readers waiting until `open`, and wait until those inside are gone. Closers take turns.

        Raises:
            Busy: Readers still hold, or another closer did not open, when the deadline passes; or the caller holds.
        """
        self._refuse_own_hold("a commit")
        with self._lock:
            try:
                deadline.wait_for(lambda: not self._closed, self._changed)
            except DeadlineExceeded as error:
                raise Busy("another commit holds the gate") from error
            self._closed = True
            try:
                deadline.wait_for(lambda: not self._readers, self._changed)
            except BaseException as error:
                count = len(self._readers)
                self._open()
                if isinstance(error, DeadlineExceeded):
                    raise Busy(
                        f"{count} readers did not finish within {deadline.seconds:g} s; the old weights go on serving"
                    ) from error
                raise

    def open(self) -> None:
        """Let readers in after `close`."""
        with self._lock:
            assert self._closed, "open follows close"
            self._open()

    @contextmanager
    def exclusive(self, deadline: Deadline) -> Iterator[None]:
        """`close` and `open` around a with statement, inside which the caller itself may read.

        Raises:
            Busy: As for `close`.
        """
        self.close(deadline)
        own = _Reader(self)
        _held.set((*_held.get(), own))
        try:
            yield
        finally:
            _forget(own)
            self._leave(own)
            with self._lock:
                if own.depth:  # something started inside still reads
                    self._readers.add(own)
                self._open()

    def _admit(self, held: tuple[_Reader, ...], ignore_pause: bool, *, locked: bool) -> _Reader | None:
        """One of `held` taken once more, or a new reader; None where a new one has to wait."""
        if not locked:
            self._lock.acquire()
        try:
            for reader in held:
                if reader.gate is self and reader.depth:
                    reader.depth += 1
                    return reader
            if self._blocked is not None:
                raise self._blocked()
            if self._mode is not None and not ignore_pause:
                if self._mode == "keep":
                    return None
                raise Paused(f"the weights are paused with mode {self._mode!r}: resume first")
            if self._closed:
                return None
            reader = _Reader(self)
            self._readers.add(reader)
            return reader
        finally:
            if not locked:
                self._lock.release()

    def _leave(self, reader: _Reader) -> None:
        with self._lock:
            reader.depth -= 1
            if reader.depth:
                return
            self._readers.discard(reader)
            if not self._readers and (self._closed or self._mode is not None):
                self._notify()

    def _open(self) -> None:
        self._closed = False
        self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for loop, event in self._wakes:
            with suppress(RuntimeError):  # that loop has been closed, and its readers with it
                loop.call_soon_threadsafe(event.set)

    @contextmanager
    def _waking(self) -> Iterator[asyncio.Event]:
        """An event of this loop that is set whenever the gate changes."""
        entry = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._wakes.append(entry)
        try:
            yield entry[1]
        finally:
            with self._lock:
                self._wakes.remove(entry)

    def _refuse_own_hold(self, what: str) -> None:
        if any(reader.gate is self and reader.depth for reader in _held.get()):
            raise Busy(f"{what} waits for readers, and the caller is one: leave reading() first")
