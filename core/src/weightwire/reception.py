"""The hub's door: accepts connections, lets in who knows the secret, and hears who falls silent."""

from __future__ import annotations

import errno
import hmac
import selectors
import socket
from functools import partial
from typing import Final

from weightwire.errors import Busy, HandshakeError, MessageError, Unauthorized, WeightwireError
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
_QUEUE: Final = 1024

_PING: Final = encode({"type": "ping"})


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on `address` alone; port 0 lets the system choose.

    Raises:
        Busy: Somebody else listens there.
        MessageError: This machine has no such address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=_QUEUE)
    except OSError as error:
        kind = Busy if error.errno == errno.EADDRINUSE else MessageError
        raise kind(f"cannot listen on {address}:{port}: {error}") from error


def is_stalled(connection: Connection) -> bool:
    """Count one heartbeat without an answer; true once there are too many. Sends our own.

    Counting heartbeats and not seconds keeps a process that was itself stopped from blaming everybody else.
    """
    connection.silent_ticks += 1
    if not connection.backlog:
        connection.send(_PING)
    return connection.silent_ticks > SILENT_TICKS


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
        """Take nobody in any more."""
        self._loop.unwatch(self._listener)
        self._listener.close()
        for stranger in tuple(self._strangers):
            stranger.close()

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
        stranger = Connection(self._loop, sock, on_frame=self._hello, on_end=self._forget, limit=_HELLO_BYTES)
        self._strangers[stranger] = None
        self._loop.later(_HELLO_SECONDS, partial(self._expire, stranger))

    def _forget(self, stranger: Connection, why: str) -> None:
        self._strangers.pop(stranger, None)

    def _expire(self, stranger: Connection) -> None:
        if stranger in self._strangers:
            stranger.drop("it did not say who it is")

    def _hello(self, stranger: Connection, frame: Frame) -> None:
        try:
            rank, pid = self._identify(frame)
            self._hub.admit(rank, pid, stranger)
        except WeightwireError as error:
            stranger.on_frame = lambda connection, frame: None
            stranger.send(encode({"type": "refused", "error": error.to_json()}))
            stranger.finish()
            return
        del self._strangers[stranger]
        self._members[rank] = stranger
        stranger.decoder.limit = MAX_FRAME
        stranger.on_frame = lambda connection, frame: self._hub.receive(rank, frame)
        stranger.on_end = lambda connection, why: self._hub.lose(rank, why)

    def _identify(self, frame: Frame) -> tuple[int, int]:
        """Member rank and pid of a hello; the secret is looked at first, so that a stranger learns nothing."""
        offered = str(frame.get("hello")).encode(errors="replace")
        if not hmac.compare_digest(offered, self._secret):
            raise Unauthorized("the secret is not that of this trainer")
        if frame.get("protocol") != PROTOCOL:
            raise HandshakeError(f"protocol {frame.get('protocol')} of the member, {PROTOCOL} of the trainer")
        if frame.get("epoch") != self._epoch:
            raise HandshakeError(f"epoch {frame.get('epoch')} of the member, {self._epoch} of the trainer")
        rank, pid = frame.get("rank"), frame.get("pid")
        if type(rank) is not int or type(pid) is not int:
            raise HandshakeError(f"rank {rank!r} and pid {pid!r} have to be integers")
        return rank, pid

    def _beat(self) -> None:
        for rank, connection in self._members.items():
            if not connection.closed and is_stalled(connection):
                self._hub.stall(rank)
