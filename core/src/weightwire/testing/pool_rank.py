"""What runs inside a rank of a `RankPool`: a loop that starts calls in threads, and the fault points."""

from __future__ import annotations

import ctypes
import functools
import gc
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from weightwire import faults
from weightwire.testing.pool_wire import (
    Action,
    Failure,
    FaultError,
    FunctionReference,
    Reached,
    Reply,
    Request,
    dump,
    load,
    resolve,
)

GRACE = 0.5
"""Seconds that threads, descriptors and calls get to end by themselves after a test."""

_HOLD_LIMIT = 120.0
_PR_SET_PDEATHSIG = 1


_at_tidy: list[Callable[[], None]] = []
_servers: list[RankServer] = []


def at_tidy(callback: Callable[[], None]) -> None:
    """Have `callback()` called in this rank when the test is over, last registered first.

    For what a function started for the test and must end before leftovers are counted.
    """
    _at_tidy.append(callback)


def count_no_leftovers() -> None:
    """Count no threads and descriptors in this rank when a test is over, from now on.

    For a process that has joined a cluster, whose library opens and closes connections when it likes.
    """
    for server in _servers:
        server.counts = False


def serve(connection: Connection) -> None:
    """Main of a rank process; ends the process when the test process closes its end or dies."""
    _die_with_parent()
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    RankServer(connection).run()


def _die_with_parent() -> None:
    # The fork server lives until the last holder of this descriptor is gone, and every rank inherits it.
    # Without ours it ends with the test process, and the signal below ends stopped ranks, which see no EOF.
    alive = getattr(multiprocessing.forkserver._forkserver, "_forkserver_alive_fd", None)
    if alive is not None:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, alive, inheritable=False)
        os.close(null)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Faults:
    """The armed points of this rank; installed as the handler of `weightwire.faults`.

    Args:
        notify: Tells the test process that a point was reached, before anything is done about it.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._armed: dict[str, tuple[Action, int]] = {}
        self._holds: dict[str, threading.Event] = {}
        faults.install(self)

    def arm(self, point: str, action: Action, after: int) -> None:
        """Do `action` once at `point`, letting `after` visits pass first."""
        with self._lock:
            self._armed[point] = (action, after)
            self._holds[point] = threading.Event()

    def let_go(self, point: str) -> None:
        """End the hold at `point`."""
        with self._lock:
            hold = self._holds.get(point)
        if hold is not None:
            hold.set()

    def clear(self) -> None:
        """Disarm everything and end every hold."""
        with self._lock:
            self._armed.clear()
            holds = list(self._holds.values())
            self._holds.clear()
        for hold in holds:
            hold.set()

    def _take(self, point: str) -> tuple[Action, threading.Event] | None:
        with self._lock:
            if (armed := self._armed.get(point)) is None:
                return None
            action, after = armed
            if after:
                self._armed[point] = (action, after - 1)
                return None
            del self._armed[point]
            return action, self._holds[point]

    def __call__(self, point: str) -> None:
        """Act on a point that was reached, if it is armed."""
        if (taken := self._take(point)) is None:
            return
        action, hold = taken
        self._notify(point)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            # To this thread: a signal to the process may stop another one first, and this one would run on a little.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif action == "raise":
            raise FaultError(f"raised at {point} because a test asked for it")
        elif action == "hold" and not hold.wait(_HOLD_LIMIT):
            raise FaultError(f"held at {point} for {_HOLD_LIMIT:g} s and never let go")


class RankServer:
    """Answers the requests of the test process; each public method is one `Request.kind`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._state: dict[str, Any] = {}
        self._running: dict[int, str] = {}
        self._faults = Faults(lambda point: self._send(Reached(point)))
        self._threads = len(_threads())
        self._descriptors = _descriptors()
        self.counts = True
        _servers.append(self)

    def run(self) -> None:
        """Serve until the connection closes, then end the process."""
        self._answer(0, lambda: None)
        while True:
            try:
                request: Request = load(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            if request.kind == "call":
                self.call(request.number, *request.payload)
            else:
                self._answer(request.number, functools.partial(getattr(self, request.kind), *request.payload))

    def call(self, number: int, reference: FunctionReference, arguments: bytes) -> None:
        """Run a function in a thread of its own, with this rank's state as its first argument."""

        def work() -> Any:
            function = resolve(reference)
            args, kwargs = load(arguments)
            return function(self._state, *args, **kwargs)

        self._running[number] = reference.qualname
        thread = threading.Thread(
            target=self._answer, args=(number, work), name=f"call-{reference.qualname}", daemon=True
        )
        thread.start()

    def at(self, point: str, action: Action, after: int) -> None:
        """Arm a fault point."""
        self._faults.arm(point, action, after)

    def let_go(self, point: str) -> None:
        """End a hold."""
        self._faults.let_go(point)

    def stacks(self) -> str:
        """What every Python thread of this rank is doing."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = [
            f"-- {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame))
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        ]
        return "\n".join(parts)

    def tidy(self) -> list[str]:
        """Disarm, forget the state, and say what a test left behind once it had `GRACE` seconds to end."""
        self._faults.clear()
        failed = []
        while _at_tidy:
            try:
                _at_tidy.pop()()
            except Exception as error:  # noqa: BLE001 - whatever is tested may raise anything; it is told
                failed.append(f"clearing up raised {type(error).__name__}: {error}")
        end = time.monotonic() + GRACE
        while self._running and time.monotonic() < end:
            time.sleep(0.002)
        self._state.clear()
        gc.collect()
        while (left := self._leftovers()) and time.monotonic() < end:
            time.sleep(0.01)
        return failed + left

    def _leftovers(self) -> list[str]:
        found = [f"call {name} is still running" for name in list(self._running.values())]
        if self.counts:
            found += self._grown(bool(found))
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            found.append("the default process group was not destroyed")
        return found

    def _grown(self, running: bool) -> list[str]:
        found = []
        threads = _threads()
        if not running and len(threads) > self._threads:
            found.append(f"{len(threads) - self._threads} threads more than before, of {sorted(threads)}")
        descriptors = _descriptors()
        if len(descriptors) > len(self._descriptors):
            new = sorted(descriptors[number] for number in descriptors.keys() - self._descriptors.keys())
            found.append(f"open descriptors: {', '.join(new)}")
        return found

    def _answer(self, number: int, work: Callable[[], Any]) -> None:
        try:
            reply = Reply(number, value=dump(work()))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised again in the test process
            reply = Reply(number, failure=Failure.of(error))
        self._running.pop(number, None)
        self._send(reply)

    def _send(self, message: Reply | Reached) -> None:
        with self._sending:
            self._connection.send_bytes(dump(message))


def _threads() -> list[str]:
    """Names of all threads of this process, native ones too."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except OSError:
            continue  # it ended while we looked
    return names


def _descriptors() -> dict[int, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the descriptor of the listing itself
    return found
