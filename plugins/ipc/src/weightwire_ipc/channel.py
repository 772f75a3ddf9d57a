"""Messages with descriptors between two processes, over a Unix socket.

A message is a JSON object of at most 64 KiB and up to 16 descriptors; what is larger travels as a memory file. A peer
that dies closes its end, which every wait here notices.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weightwire.deadline import Deadline
from weightwire.errors import HandshakeError, PeerLost, TransferError

_LIMIT = 64 << 10
_DESCRIPTORS = 16
_SLICE_MILLISECONDS = 50
_MOMENT_SECONDS = 5e-4


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who is at the other end, by word of the kernel; `pid` is 0 for a process of a pid namespace unknown here."""

    pid: int
    uid: int
    gid: int


@dataclass(slots=True)
class Message:
    """What came: a record and the descriptors with it, which are the receiver's to close."""

    record: dict[str, Any]
    descriptors: list[int]

    def close(self) -> None:
        """Close the descriptors that nobody has taken."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors.clear()


class Channel:
    """One end of a connection.

    Args:
        sock: A connected SOCK_SEQPACKET socket; owned from now on.
        peer: Who is at the other end, in words for messages.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.peer = peer
        self.credentials = Credentials(*struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))

    def fileno(self) -> int:
        """Descriptor to poll: readable when a message is here, or the peer is gone."""
        return self._sock.fileno()

    def send(self, record: dict[str, Any], descriptors: Sequence[int] = (), *, deadline: Deadline) -> None:
        """Send a record, and copies of descriptors.

        Raises:
            PeerLost: The peer is gone.
            DeadlineExceeded: It takes nothing.
        """
        data = json.dumps(record, separators=(",", ":")).encode()
        assert len(data) <= _LIMIT and len(descriptors) <= _DESCRIPTORS, "large things travel as memory files"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        while True:
            try:
                self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                wait_any([], deadline, f"{self.peer} to take a message", writable=self)
            except OSError as error:
                raise self.lost() from error

    def receive(self, deadline: Deadline, what: str = "a message") -> Message:
        """Wait for the next message.

        Raises:
            PeerLost: The peer is gone.
            DeadlineExceeded: Nothing came.
            TransferError: It is malformed.
        """
        while (message := self.poll()) is None:
            wait_any([self], deadline, f"{what} from {self.peer}")
        return message

    def poll(self) -> Message | None:
        """The next message, if one is here.

        Raises:
            PeerLost: The peer is gone.
            TransferError: It is malformed.
        """
        space = socket.CMSG_SPACE(4 * _DESCRIPTORS)
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(_LIMIT, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self.lost() from error
        message = Message({}, _descriptors_in(ancillary))
        if not data:
            message.close()
            raise self.lost()
        try:
            message.record = json.loads(data)
        except (ValueError, RecursionError):
            flags |= socket.MSG_TRUNC
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not isinstance(message.record, dict):
            message.close()
            raise TransferError(f"{self.peer} sent what is no message", transport="ipc")
        return message

    def lost(self) -> PeerLost:
        """The error for a peer that is gone."""
        return PeerLost(f"{self.peer} closed its connection", transport="ipc", rank=self.peer)

    def close(self) -> None:
        """Hang up; idempotent."""
        self._sock.close()


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def wait_any(
    readable: Sequence[Channel | int], deadline: Deadline, what: str, *, writable: Channel | None = None
) -> None:
    """Wait until one of these can be read, or written; notices within 50 ms that the deadline was cancelled.

    Raises:
        DeadlineExceeded: None can in time.
        BaseException: What the deadline was cancelled with.
    """
    poller = select.poll()
    for one in readable:
        poller.register(one, select.POLLIN)
    if writable is not None:
        poller.register(writable, select.POLLOUT)
    while True:
        deadline.check(what)
        if poller.poll(min(_SLICE_MILLISECONDS, 1 + int(1e3 * deadline.remaining()))):
            return


class Signal:
    """A counting semaphore that two processes share, and that can be polled together with a channel.

    Args:
        fd: Its descriptor, owned from now on; None makes a new one. One that came from elsewhere is to be `check`ed.
        count: What a new one begins with.
    """

    def __init__(self, fd: int | None = None, *, count: int = 0) -> None:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE
        self.fd = os.eventfd(count, flags) if fd is None else fd
        self._close = weakref.finalize(self, os.close, self.fd)

    def check(self, peer: str) -> None:
        """Refuse what would not count, or would block.

        Raises:
            HandshakeError: It is no eventfd.
        """
        if os.readlink(f"/proc/self/fd/{self.fd}") != "anon_inode:[eventfd]":
            raise HandshakeError(f"{peer} sent a signal that is none", transport="ipc")
        os.set_blocking(self.fd, False)

    def fileno(self) -> int:
        """Descriptor to poll."""
        return self.fd

    def give(self) -> None:
        """Count one up.

        Raises:
            TransferError: The peer has counted it up to its end.
        """
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError as error:
            raise TransferError("the peer has filled a signal that is ours to give", transport="ipc") from error

    def take(self) -> bool:
        """Count one down; False if the count is 0."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def take_soon(self) -> bool:
        """Count one down, trying for a moment if the count is 0: to sleep and be woken costs more than the moment."""
        until = time.perf_counter() + _MOMENT_SECONDS
        while not self.take():
            if time.perf_counter() > until:
                return False
            os.sched_yield()
        return True

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        self._close()
