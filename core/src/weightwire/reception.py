"""The hub's door: accepts connections, lets in who knows the secret, and hears who falls silent."""

from __future__ import annotations

import hmac
import selectors
import socket
from functools import partial
from typing import Final

from weightwire.errors import HandshakeError, Unauthorized, WeightwireError
from weightwire.frames import MAX_FRAME, Frame, encode
from weightwire.hub import Hub
from weightwire.loop import Connection, Loop

PROTOCOL: Final = 1
"""Version of the frames between members and hub."""

SILENT_TICKS: Final = 5
"""Heartbeats per peer timeout."""

_HELLO_BYTES: Final = 4 << 10
_HELLO_SECONDS: Final = 2.0
_STRANGERS: Final = 256

_PING: Final = encode({"type": "ping"})


def is_stalled(connection: Connection) -> bool:
    """Count one heartbeat without an answer; true once there are too many. Sends our own.

    Counting heartbeats and not seconds keeps a process that was itself stopped from blaming everybody else.
    """
    connection.silent_ticks += 1
    if not connection.backlog:
        connection.send(_PING)
    return connection.silent_ticks > SILENT_TICKS


def _ignore(_: object) -> None:
    """For what is said by, or of, a connection that is on its way out."""


class Reception:
    """Turns connections into members of `hub`, for the loop's thread alone.

    A stranger costs a connection for 2 s and 4 KiB at most; when 256 are here, the longest waiting one goes, so
    that none of them keeps a member out.
    """

    def __init__(self, loop: Loop, listener: socket.socket, hub: Hub, *, secret: bytes, epoch: int) -> None:
        self._loop = loop
        self._listener = listener
        self._hub = hub
        self._secret = secret.hex().encode()
        self._epoch = epoch
        self._strangers: dict[Connection, None] = {}
        self._members: dict[int, Connection] = {}
        listener.setblocking(False)
        self._open_door()
        loop.every(hub.peer_timeout / SILENT_TICKS, self._beat)

    def close(self) -> None:
        """Take nobody in any more, and end the epoch in good order."""
        self._loop.unwatch(self._listener)
        self._listener.close()
        for stranger in tuple(self._strangers):
            stranger.close()
        self._hub.close()

    def _open_door(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.watch(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            # No descriptor is free: without a pause the waiting connection would keep this thread spinning.
            self._loop.unwatch(self._listener)
            self._loop.later(0.1, self._open_door)
            return
        if len(self._strangers) >= _STRANGERS:
            next(iter(self._strangers)).drop("too many strangers")
        stranger = Connection(self._loop, sock, limit=_HELLO_BYTES)
        stranger.on_frame = partial(self._hello, stranger)
        stranger.on_end = partial(self._forget, stranger)
        self._strangers[stranger] = None
        self._loop.later(_HELLO_SECONDS, partial(self._expire, stranger))

    def _forget(self, stranger: Connection, why: str) -> None:
        self._strangers.pop(stranger, None)

    def _expire(self, stranger: Connection) -> None:
        if stranger in self._strangers:
            stranger.drop("it did not say who it is")

    def _hello(self, stranger: Connection, frame: Frame) -> None:
        again = False
        try:
            rank, pid, epoch = self._identify(frame)
            again = epoch > self._epoch and self._hub.failure is not None
            if epoch != self._epoch:
                raise HandshakeError(f"the member wants epoch {epoch}, and this is epoch {self._epoch}")
            self._hub.admit(rank, pid, stranger)
        except WeightwireError as error:
            stranger.on_frame = _ignore
            stranger.send(encode({"type": "refused", "error": error.to_json(), "again": again}))
            stranger.finish()
            return
        del self._strangers[stranger]
        self._members[rank] = stranger
        stranger.decoder.limit = MAX_FRAME
        stranger.on_frame = partial(self._hub.receive, rank)
        stranger.on_end = partial(self._hub.lose, rank)

    def _identify(self, frame: Frame) -> tuple[int, int, int]:
        """Member rank, pid and epoch of a hello; the secret is looked at first, so that a stranger learns nothing."""
        offered = str(frame.get("hello")).encode(errors="replace")
        if not hmac.compare_digest(offered, self._secret):
            raise Unauthorized("the secret is not that of this trainer")
        if frame.get("protocol") != PROTOCOL:
            raise HandshakeError(f"the member speaks protocol {frame.get('protocol')}, the trainer {PROTOCOL}")
        rank, pid, epoch = frame.get("rank"), frame.get("pid"), frame.get("epoch")
        if type(rank) is not int or type(pid) is not int or type(epoch) is not int:
            raise HandshakeError(f"rank {rank!r}, pid {pid!r} and epoch {epoch!r} have to be integers")
        return rank, pid, epoch

    def _beat(self) -> None:
        for rank, connection in self._members.items():
            if not connection.closed and is_stalled(connection):
                self._hub.stall(rank)
