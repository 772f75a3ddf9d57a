"""One daemon thread that owns the sockets of a Rendezvous, and the framed connections it serves.

Nothing in the thread blocks but `select`: sockets are non-blocking, and what the kernel does not take waits in a
buffer per connection. Only `Loop.call` and `Loop.join` may be used from other threads.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from weightwire.frames import MAX_FRAME, Decoder, Frame, FrameError

_READ: Final = selectors.EVENT_READ
_WRITE: Final = selectors.EVENT_WRITE
_CHUNK: Final = 256 << 10

_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


class Loop:
    """A selectors loop in a thread of its own.

    Args:
        name: The thread's name.
        broken: Called on the thread with an exception that nobody handled, just before the loop ends.
    """

    def __init__(self, name: str, *, broken: Callable[[Exception], None]) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = itertools.count()
        self._ended = False
        self._end_by: float | None = None
        self._broken = broken
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.watch(self._woken, _READ, lambda events: self._woken.recv(_CHUNK))
        _loops.add(self)

    def start(self) -> None:
        """Start the thread; what was registered before is served from now on."""
        self._thread.start()

    def call(self, function: Callable[[], object]) -> bool:
        """Have `function` called on the loop's thread, soon and in order; False once the loop has ended."""
        with self._lock:
            if self._ended:
                return False
            self._calls.append(function)
            with suppress(BlockingIOError):  # so many bytes are unread that it is going to wake anyway
                self._waker.send(b"\0")
        return True

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Call `function` in `seconds`."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._serial), function))

    def every(self, seconds: float, function: Callable[[], object]) -> None:
        """Call `function` each `seconds`; once, not many times, after this process was itself held up."""

        def again() -> None:
            self.later(seconds, again)
            function()

        self.later(seconds, again)

    def watch(self, watched: socket.socket, events: int, handler: Callable[[int], object]) -> None:
        """Call `handler(events)` whenever `watched` is ready for one of `events`."""
        if watched in self._selector.get_map():
            self._selector.modify(watched, events, handler)
        else:
            self._selector.register(watched, events, handler)

    def unwatch(self, watched: socket.socket) -> None:
        """Stop watching; nothing happens to a socket that was not watched."""
        if watched in self._selector.get_map():
            self._selector.unregister(watched)

    def finish(self, seconds: float) -> None:
        """End the loop as soon as nothing is watched any more, and in `seconds` at the latest."""
        self._end_by = time.monotonic() + seconds

    def _run(self) -> None:
        try:
            while not self._over():
                self._once()
        except Exception as error:  # noqa: BLE001  a bug of ours has to reach whoever waits
            self._broken(error)
        finally:
            with self._lock:
                self._ended = True
            self.abandon()

    def _over(self) -> bool:
        idle = len(self._selector.get_map()) == 1
        return self._end_by is not None and (idle or time.monotonic() >= self._end_by)

    def _once(self) -> None:
        """Read before timers, so that a process that was stopped sees what came before it judges silence."""
        ends = [self._end_by] if self._end_by is not None else []
        ends += [self._timers[0][0]] if self._timers else []
        wait = max(0.0, min(ends) - time.monotonic()) if ends else None
        for key, events in self._selector.select(wait):
            key.data(events)
        for _ in range(len(self._calls)):
            self._calls.popleft()()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def abandon(self) -> None:
        """Close every socket, without a word to the other side."""
        # never unregister: a forked child shares the epoll set of its parent
        for key in list((self._selector.get_map() or {}).values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._waker.close()
        self._selector.close()


def _after_fork() -> None:
    # A child that holds its parent's connections would hide the parent's death from everybody.
    for loop in list(_loops):
        loop.abandon()


os.register_at_fork(after_in_child=_after_fork)


class Connection:
    """A TCP connection that carries frames, for the loop's thread alone.

    Args:
        loop: Serves it.
        sock: Connected; owned from now on.
        on_frame: Called with each frame received.
        on_end: Called once with the reason in words, unless `close` ended it.
        limit: The longest frame accepted, in bytes.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        *,
        on_frame: Callable[[Frame], object] = bool,
        on_end: Callable[[str], object] = bool,
        limit: int = MAX_FRAME,
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.on_frame = on_frame
        self.on_end = on_end
        self.decoder = Decoder(limit)
        self.silent_ticks = 0
        self.closed = False
        self._loop = loop
        self._socket = sock
        self._out: deque[memoryview] = deque()
        self._backlog = 0
        self._finishing = False
        loop.watch(sock, _READ, self._ready)

    @property
    def backlog(self) -> int:
        """Bytes that wait for the other side to read."""
        return self._backlog

    def send(self, frame: bytes) -> None:
        """Send an encoded frame, now or when the other side reads; never blocks.

        A side that leaves more than `MAX_FRAME` bytes unread is dropped, from the loop and not from here, so that
        a frame for many is handed to all of them before the first of them is missed.
        """
        if self.closed or self._finishing:
            return
        if self._backlog > MAX_FRAME:
            self._loop.call(lambda: self.drop("it does not read what it is sent"))
            return
        self._out.append(memoryview(frame))
        self._backlog += len(frame)
        self._flush()

    def finish(self, last_frame: bytes | None = None) -> None:
        """Say no more: close this direction once everything is sent, and wait for the other side to close."""
        if last_frame is not None:
            self.send(last_frame)
        if not self.closed:
            self._finishing = True
            self._flush()

    def close(self) -> None:
        """Close at once, without calling `on_end`."""
        if not self.closed:
            self.closed = True
            self._loop.unwatch(self._socket)
            self._socket.close()

    def drop(self, why: str) -> None:
        """Close at once and tell `on_end` why."""
        if not self.closed:
            self.close()
            self.on_end(why)

    def _ready(self, events: int) -> None:
        if events & _WRITE and not self.closed:
            self._flush()
        if events & _READ and not self.closed:
            self._read()

    def _flush(self) -> None:
        try:
            while self._out:
                sent = self._socket.send(self._out[0])
                self._backlog -= sent
                if sent < len(self._out[0]):
                    self._out[0] = self._out[0][sent:]
                else:
                    self._out.popleft()
            if self._finishing:
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            # The reading half finds the end, after what the other side said last.
            self._out.clear()
            self._backlog = 0
        self._loop.watch(self._socket, _READ | (_WRITE if self._out else 0), self._ready)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self.drop(f"its connection failed ({error.strerror})")
            return
        if not data:
            self.drop("its connection closed")
            return
        self.silent_ticks = 0
        try:
            for frame in self.decoder.feed(data):
                self.on_frame(frame)
                if self.closed:
                    return
        except FrameError as error:
            self.drop(f"it sent {error}")
