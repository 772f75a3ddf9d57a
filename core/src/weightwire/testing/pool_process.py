"""One rank of a `RankPool`, seen from the test process."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

from weightwire.testing.pool_call import CALL_SECONDS, PendingCall, RankDied
from weightwire.testing.pool_rank import serve
from weightwire.testing.pool_wire import Action, Reached, Reply, Request, dump, load, reference_to

T = TypeVar("T")

_CONTROL_SECONDS = 10.0


class Rank:
    """A process that runs functions for a test.

    A function is any function at the level of a module, of a test module too. Its first argument is the
    rank's `state`, a dict that lives until the test ends. Every call has its own thread, so that a second
    call can be made while the first one is blocked; results and arguments are copied.

    Attributes:
        index: Position among the ranks borrowed together.
        pid: Process id.

    Example:
        def join(state: dict[str, Any], port: int) -> None:
            state["group"] = connect(port)

        def test_joins(ranks):
            first, second = ranks(2)
            first.call(join, 1234)
    """

    def __init__(self, context: ForkServerContext) -> None:
        self.index = 0
        self._connection, far_end = context.Pipe()
        self._process = context.Process(target=serve, args=(far_end,), daemon=True, name="weightwire-rank")
        self._process.start()
        far_end.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._pending: dict[int, PendingCall[Any]] = {}
        self._reached: Counter[str] = Counter()
        self._exit: int | None = None
        self._up: PendingCall[None] = PendingCall(f"start of {self}", lambda: "")
        self._pending[0] = self._up
        threading.Thread(target=self._read, args=(self._connection,), name=f"{self}", daemon=True).start()

    def __repr__(self) -> str:
        return f"rank {self.index} (pid {self.pid})"

    @property
    def alive(self) -> bool:
        """Whether the process exists (a stopped one does)."""
        return self._exit is None

    @property
    def exit_code(self) -> int | None:
        """Exit status, minus the number of the signal that ended it, or None while alive."""
        return self._exit

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped by SIGSTOP, all of its threads."""
        try:
            tasks = os.listdir(f"/proc/{self.pid}/task")
            return all(_state(f"/proc/{self.pid}/task/{task}/stat") == "T" for task in tasks)
        except (FileNotFoundError, ProcessLookupError):
            return False

    def ready(self) -> None:
        """Wait until the process serves calls."""
        self._up.wait(60.0)
        if not self.alive:
            raise RankDied(f"{self} ended while it started, exit code {self._exit}")

    def start(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> PendingCall[T]:
        """Run `function(state, *args, **kwargs)` in the rank and return at once.

        Raises:
            ValueError: `function` is not at module level.
            RankDied: The process has ended.
        """
        reference = reference_to(function)
        return self._request("call", reference, dump((args, kwargs)), words=f"{reference.qualname} on {self}")

    def call(self, function: Callable[..., T], *args: Any, timeout: float = CALL_SECONDS, **kwargs: Any) -> T:
        """Run `function(state, *args, **kwargs)` in the rank and return what it returns.

        Raises:
            BaseException: What the function raised, its type kept; the rank's traceback is its cause.
            RankDied: The process has ended, or ends before the function does.
            TimeoutError: `timeout` seconds passed; the message shows the rank's stacks. The call goes on.
        """
        return self.start(function, *args, **kwargs).result(timeout)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone, its sockets closed by the kernel."""
        self._signal(signal.SIGKILL)
        self._await(lambda: not self.alive, _CONTROL_SECONDS, "end")

    def stop(self) -> None:
        """SIGSTOP; returns when the process stands still."""
        self._signal(signal.SIGSTOP)
        self._await(lambda: self.stopped or not self.alive, _CONTROL_SECONDS, "stop")

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def at(self, point: str, action: Action, *, after: int = 0) -> None:
        """Arm a fault point (see `weightwire.faults`) for one visit.

        Args:
            point: Its name.
            action: `"kill"` and `"stop"` signal the rank's own process, `"raise"` raises `FaultError` (a
                RuntimeError), `"hold"` waits for `let_go`, `"note"` only makes `reached` true.
            after: Visits to let pass first.
        """
        with self._changed:
            del self._reached[point]
        self._request("at", point, action, after).result(_CONTROL_SECONDS)

    def reached(self, point: str, timeout: float = CALL_SECONDS) -> None:
        """Wait until the rank has come to a point armed with `at`; known also when it killed itself there.

        Raises:
            RankDied: It ended without coming there.
            TimeoutError: It did not come there within `timeout` seconds; the message shows its stacks.
        """
        self._await(lambda: self._reached[point] > 0 or not self.alive, timeout, f"reach {point}")
        if not self._reached[point]:
            raise RankDied(f"{self} ended before it reached {point}, exit code {self._exit}")

    def let_go(self, point: str) -> None:
        """End the hold at `point`."""
        self._request("let_go", point).result(_CONTROL_SECONDS)

    def stacks(self, timeout: float = 2.0) -> str:
        """What every thread of the rank is doing, or why that is not known."""
        if self.stopped:
            return f"{self} is stopped"
        try:
            text: str = self._request("stacks").result(timeout)
        except (RankDied, TimeoutError) as error:
            return str(error)
        return text

    def tidy(self) -> PendingCall[list[str]]:
        """Have the rank disarm, forget its state and say what is left over."""
        return self._request("tidy")

    def _request(self, kind: str, *payload: Any, words: str = "") -> PendingCall[Any]:
        where = self.stacks if kind == "call" else lambda: ""
        pending: PendingCall[Any] = PendingCall(words or f"{kind} on {self}", where)
        number = next(self._numbers)
        with self._changed:
            if not self.alive:
                raise RankDied(f"{self} has ended, exit code {self._exit}")
            self._pending[number] = pending
        try:
            with self._sending:
                self._connection.send_bytes(dump(Request(number, kind, payload)))
        except OSError as error:
            raise RankDied(f"{self} has ended") from error
        return pending

    def _signal(self, number: signal.Signals) -> None:
        with self._changed, contextlib.suppress(ProcessLookupError):  # gone, and `_bury` has not noted it yet
            if self.alive:
                os.kill(self.pid, number)

    def _await(self, predicate: Callable[[], bool], seconds: float, words: str) -> None:
        end = time.monotonic() + seconds
        with self._changed:
            while not predicate():
                if (left := end - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(left, 0.01))
            else:
                return
        raise TimeoutError(f"{self} did not {words} within {seconds:g} s\n{self.stacks()}")

    def _read(self, connection: Connection) -> None:
        while True:
            ready = wait([connection, self._process.sentinel])
            if connection not in ready:
                break
            try:
                message: Reply | Reached = load(connection.recv_bytes())
            except (EOFError, OSError):
                break
            self._take(message)
        self._bury()

    def _take(self, message: Reply | Reached) -> None:
        with self._changed:
            if isinstance(message, Reached):
                self._reached[message.point] += 1
            elif (pending := self._pending.pop(message.number, None)) is not None:
                pending.answer(message)
            self._changed.notify_all()

    def _bury(self) -> None:
        self._process.join(_CONTROL_SECONDS)
        if self._process.exitcode is None:  # it closed its end and lives on
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        with self._changed:
            self._exit = code
            orphans = list(self._pending.values())
            self._pending.clear()
            self._changed.notify_all()
        for pending in orphans:
            pending.bury(f"the process ended, exit code {self._exit}")
        with self._sending:
            self._connection.close()
        self._process.close()


def _state(path: str) -> str:
    """The letter of a thread's state from its `stat` file, whose second field may hold anything in brackets."""
    with open(path) as file:
        return file.read().rpartition(")")[2].split()[0]
