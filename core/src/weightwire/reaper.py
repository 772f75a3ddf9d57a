"""What outlives a call: process groups whose threads are still inside a failed operation.

gloo cannot be interrupted: an operation whose peer stopped in mid-message ends when its own timeout does, and
destroying its group waits for that. So a failed group is *parked* here, with every buffer its operations may still
write to, and one daemon thread destroys it once they have ended.

An interpreter that ends must neither wait for such a group nor be hurt by it. Hence two rules. A group that was
not destroyed in order is never destroyed at all: `retain` takes a reference that only `destroy` gives back. And no
thread of Python may return from C++ while the interpreter is being taken down, since CPython ends it there and C++
calls that a crash (exit status 134): such calls go through `settled`, in short slices, and the last slice is
waited for, as is a group that `construct` is still making.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from weightwire.deadline import Deadline

_INTERVAL = 0.1
_EXIT_SECONDS = 1.0
_EXIT_CONSTRUCT_SECONDS = 60.0
_CONSTRUCT_INTERVAL = 0.005

_condition = threading.Condition()
_parked: list[_Parked] = []
_thread: threading.Thread | None = None
_teardown = threading.RLock()
_never = threading.Event()
_inside: set[int] = set()
_constructing: set[int] = set()
_leaver: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Parked:
    groups: list[Any]
    works: list[Any]
    keep: list[Any]
    abandon: Callable[[], None]

    def ended(self) -> bool:
        return all(work.is_completed() for work in self.works)


def retain(group: Any) -> None:
    """Keep `group` from being destroyed by anything but `destroy`, the end of the interpreter included."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def leaving() -> bool:
    """Whether the interpreter ends, which waits for constructors."""
    return _leaver is not None


def construct(make: Callable[[], Any], *, watch: Callable[[], None]) -> Any:
    """Make a process group on a thread of its own, since its constructor cannot be interrupted either.

    A constructor of gloo whose peer leaves at the wrong moment waits for a connection until its own timeout.

    Args:
        make: Constructs a group and returns it; ends by itself some time.
        watch: Called meanwhile, every few milliseconds; raises once the group is given up.

    Returns:
        The group, retained. One that is given up and made all the same is parked.

    Raises:
        BaseException: What `make` or `watch` raised.
    """
    construction = _Construction(make)
    construction.start()
    try:
        while not construction.ended.wait(_CONSTRUCT_INTERVAL):
            watch()
    except BaseException:
        construction.give_up()
        raise
    construction.join()
    if construction.error is not None:
        raise construction.error
    return construction.group


class _Construction(threading.Thread):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(name="weightwire-construct", daemon=True)
        self._make = make
        self._lock = threading.Lock()
        self._given_up = False
        self.ended = threading.Event()
        self.group: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        thread = threading.get_ident()
        _constructing.add(thread)
        try:
            group = self._make()
            retain(group)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self.error = error
        else:
            with self._lock:
                if not self._given_up:
                    self.group = group
                elif _leaver is None:
                    park([group])
        finally:
            self.ended.set()
            _constructing.discard(thread)

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            group, self.group = self.group, None
        if group is not None:
            park([group])


def destroy(groups: list[Any]) -> None:
    """Destroy groups whose operations have all ended, emptying the list; joins their threads."""
    with _teardown:
        while groups:
            group = groups.pop()
            if _leaver is not None:
                continue
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
            del group


def park(
    groups: Iterable[Any],
    *,
    works: Iterable[Any] = (),
    keep: Iterable[Any] = (),
    abandon: Callable[[], None] = lambda: None,
) -> None:
    """Take over retained groups that failed; returns at once.

    Args:
        groups: Process groups that went through `retain`.
        works: Their operations, as far as these may still be running.
        keep: What must stay allocated until the operations have ended.
        abandon: Called once by the reaper's thread; asks the operations to end, where a backend can.
    """
    global _thread
    parked = _Parked(list(groups), list(works), list(keep), abandon)
    with _condition:
        _parked.append(parked)
        if _thread is None:
            _thread = threading.Thread(target=_reap, name="weightwire-reaper", daemon=True)
            _thread.start()


def parked_count() -> int:
    """How many failed sets of groups are still parked in this process."""
    with _condition:
        return len(_parked)


def wait_until_empty(deadline: Deadline) -> None:
    """Wait until nothing is parked.

    Raises:
        DeadlineExceeded: Some operation had not ended.
    """
    with _condition:
        thread = _thread
        deadline.wait_for(lambda: not _parked and _thread is None, _condition, "the reaper of failed groups")
    if thread is not None:
        thread.join(deadline.remaining())


def settled(work: Any, seconds: float) -> bool:
    """Wait up to `seconds` for a gloo collective to end, well or not; returns whether it has.

    Only for operations whose `wait` leaves them alone when it runs out of time: gloo's collectives do, its send and
    recv close the connection.
    """
    if work.is_completed():
        return True
    thread = threading.get_ident()
    _inside.add(thread)
    try:
        if _leaver not in (None, thread):
            time.sleep(seconds)
            return False
        # This slice being over and a failed operation sound the same: is_completed() tells.
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(seconds=seconds))
        return bool(work.is_completed())
    finally:
        _inside.discard(thread)


def _reap() -> None:
    global _thread
    abandoned: set[int] = set()
    while True:
        with _condition:
            waiting = list(_parked)
        for parked in waiting:
            with _teardown:
                leaving = _leaver is not None
                if not leaving and id(parked) not in abandoned:
                    abandoned.add(id(parked))
                    parked.abandon()
                if not leaving and parked.ended():
                    parked.works.clear()
                    destroy(parked.groups)
                    parked.keep.clear()
                    abandoned.discard(id(parked))
                    with _condition:
                        _parked.remove(parked)
            if leaving:
                # The interpreter ends: whatever is let go of now would be destroyed in the middle of that.
                _never.wait()
        waiting.clear()
        with _condition:
            if not _parked:
                _thread = None
                _condition.notify_all()
                return
            _condition.wait(_INTERVAL)


@atexit.register
def _leave() -> None:
    global _leaver
    with _teardown:
        _leaver = threading.get_ident()
    until = time.monotonic() + _EXIT_SECONDS
    while _inside - {_leaver} and time.monotonic() < until:
        time.sleep(0.001)
    # Waits for keys end now, by `leaving`; a connection is given up after five times gloo's timeout (measured).
    until = time.monotonic() + _EXIT_CONSTRUCT_SECONDS
    while _constructing and time.monotonic() < until:
        time.sleep(0.001)
