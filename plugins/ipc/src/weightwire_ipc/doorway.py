"""How a worker comes to a trainer rank's memory: a Unix socket, the peer's credentials, a secret, and a probe.

The socket has an unguessable name without a file (Linux's abstract namespace), or an unguessable file of mode 0600 that
is gone once everybody has come. Who connects has to be the same user and to prove the secret of the link; then a memory
file is handed over with random bytes in it, which the worker has to read back: what the transport does, once, in small.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightwire.deadline import Deadline
from weightwire.errors import HandshakeError, MessageError, PeerLost, TransferError
from weightwire_ipc.channel import Channel, wait_any
from weightwire_ipc.host import apart, identity, unreachable
from weightwire_ipc.memory import Mapping as MemoryMapping
from weightwire_ipc.memory import MemoryFile

_PROBE_BYTES = 32
_STRANGERS = 32
_AGAIN_SECONDS = 0.02


@dataclass(slots=True)
class _Visitor:
    """Somebody at the door: which member it says to be, and what it has to read from the probe."""

    channel: Channel
    member: int | None = None
    expected: str = ""


class Doorway:
    """The socket that a trainer rank hands its memory out at.

    Args:
        directory: Where to make a file for it; None makes a name without one.

    Attributes:
        address: Its name, for `knock`.

    Raises:
        MessageError: No socket can be made in `directory`.
    """

    def __init__(self, directory: str | None) -> None:
        name = f"weightwire-{secrets.token_hex(16)}"
        self._file = None if directory is None else Path(directory, name)
        self.address = f"@{name}" if self._file is None else str(self._file)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.fchmod(self._socket.fileno(), 0o600)  # what bind then gives the file
            self._socket.bind(_bindable(self.address))
        except OSError as error:
            self._socket.close()
            raise MessageError(f"socket_directory {directory!r} takes no socket: {error.strerror or error}") from error
        self._socket.listen(128)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Descriptor to poll."""
        return self._socket.fileno()

    def admit(self, members: Mapping[int, str], *, secret: bytes, deadline: Deadline) -> dict[int, Channel]:
        """Wait until all of `members` (rank to name in words) have come and have read the probe.

        Raises:
            DeadlineExceeded: Somebody did not come; it is named.
        """
        visitors: list[_Visitor] = []
        admitted: dict[int, Channel] = {}
        try:
            while len(admitted) < len(members):
                missing = [name for rank, name in members.items() if rank not in admitted]
                wait_any([self.fileno(), *(one.channel for one in visitors)], deadline, f"{missing[0]} to connect")
                visitors += self._arrivals()
                for visitor in list(visitors):
                    if self._advance(visitor, members, admitted, secret, deadline):
                        visitors.remove(visitor)
                # Whoever says nothing must not use up our descriptors; members may all be here before they speak.
                silent = [visitor for visitor in visitors if visitor.member is None]
                for stranger in silent[: -(_STRANGERS + len(members))]:
                    stranger.channel.close()
                    visitors.remove(stranger)
        except BaseException:
            for channel in admitted.values():
                channel.close()
            raise
        finally:
            for visitor in visitors:
                visitor.channel.close()
        return admitted

    def _arrivals(self) -> list[_Visitor]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._socket.accept()
                channel = Channel(sock, "a process that connected")
                if channel.credentials.uid == os.getuid():
                    found.append(_Visitor(channel))
                else:
                    channel.close()
        return found

    def _advance(
        self,
        visitor: _Visitor,
        members: Mapping[int, str],
        admitted: dict[int, Channel],
        secret: bytes,
        deadline: Deadline,
    ) -> bool:
        """Hear what a visitor has to say; returns whether it is a visitor no longer."""
        channel = visitor.channel
        try:
            message = channel.poll()
            if message is None:
                return False
            message.close()
            if visitor.member is None:
                proof, member = message.record.get("secret"), message.record.get("member")
                said = proof.encode(errors="replace") if isinstance(proof, str) else b""
                if not hmac.compare_digest(said, secret.hex().encode()):
                    raise TransferError("a wrong secret")
                if not isinstance(member, int) or member not in members or member in admitted:
                    raise TransferError("a member that is not waited for")
                visitor.member, visitor.expected = member, secrets.token_hex(_PROBE_BYTES // 2)
                channel.peer = members[member]
                self._probe(visitor, deadline)
                return False
            if message.record.get("probe") != visitor.expected:
                raise TransferError("what it read is not what is there")
            channel.send({"welcome": os.getpid()}, deadline=deadline)
            admitted[visitor.member] = channel
        except (PeerLost, TransferError):
            channel.close()
        return True

    def _probe(self, visitor: _Visitor, deadline: Deadline) -> None:
        file = MemoryFile(_PROBE_BYTES, what="the probe")
        file.mapping[:] = visitor.expected.encode()
        visitor.channel.send({"probe": _PROBE_BYTES}, [file.fd], deadline=deadline)
        file.close()

    def close(self) -> None:
        """Take nobody any more; idempotent."""
        self._socket.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def knock(
    address: str,
    *,
    peer: str,
    member: int,
    secret: bytes,
    trainer: Mapping[str, Any],
    deadline: Deadline,
) -> Channel:
    """Come to a trainer rank's doorway, and prove that its memory can be read here.

    Args:
        address: Of the doorway.
        peer: The trainer rank in words.
        member: This member's rank in the link.
        secret: Of the link.
        trainer: `identity()` of the trainer rank.
        deadline: Of the public call.

    Raises:
        HandshakeError: Memory cannot be shared; says why and what to do.
        PeerLost: The trainer rank hung up.
    """
    here = identity()
    if reason := apart(trainer, here):
        raise HandshakeError(f"{peer}: {reason}", transport="ipc")
    channel = Channel(_connected(address, peer, trainer, here, deadline), peer)
    try:
        if channel.credentials.uid != os.getuid():
            words = f"{peer} is a process of user {channel.credentials.uid} and this is one of {os.getuid()}"
            raise HandshakeError(f"{words}: run both as one user, or use backend 'nccl'", transport="ipc")
        channel.send({"secret": secret.hex(), "member": member}, deadline=deadline)
        message = channel.receive(deadline, "a probe")
        try:
            read = _read_probe(message.record.get("probe"), message.descriptors)
        finally:
            message.close()
        channel.send({"probe": read}, deadline=deadline)
        channel.receive(deadline, "a welcome").close()
    except BaseException:
        channel.close()
        raise
    return channel


def _connected(
    address: str, peer: str, trainer: Mapping[str, Any], here: Mapping[str, Any], deadline: Deadline
) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    while True:
        try:
            sock.connect(_bindable(address))
            return sock
        except BlockingIOError:  # its backlog is full
            deadline.sleep(_AGAIN_SECONDS)
        except OSError as error:
            sock.close()
            if error.errno not in (errno.ECONNREFUSED, errno.ENOENT, errno.EACCES, errno.EPERM):
                raise HandshakeError(f"{peer} cannot be reached at {address}: {error}", transport="ipc") from error
            directory = None if address.startswith("@") else str(Path(address).parent)
            reason = unreachable(trainer, here, directory=directory)
            raise HandshakeError(f"{peer} cannot be reached at {address}: {reason}", transport="ipc") from error


def _read_probe(size: object, descriptors: list[int]) -> str:
    if size != _PROBE_BYTES or len(descriptors) != 1:
        raise HandshakeError("the probe that came is none: both sides need the same weightwire-ipc", transport="ipc")
    mapping = MemoryMapping(descriptors.pop(), _PROBE_BYTES, what="the probe")
    return bytes(mapping.window().tolist()).decode("ascii", "replace")


def _bindable(address: str) -> str:
    return f"\0{address[1:]}" if address.startswith("@") else address
