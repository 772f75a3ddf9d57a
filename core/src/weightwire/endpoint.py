"""Where a Rendezvous listens, and how it is reached."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from weightwire.deadline import Deadline
from weightwire.errors import Busy, MessageError, PeerLost

WRONG_ADDRESS: Final = "check master_address and master_port"

AGAIN_SECONDS: Final = 0.05
"""After which who was not let in tries again."""
_QUEUE: Final = 1024
_POLL_SECONDS: Final = 0.01


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


def connect(address: str, port: int, deadline: Deadline, *, waits: bool = False) -> socket.socket:
    """A connected socket, to the first of the addresses that the name stands for and that answers.

    Args:
        address: A name or a number.
        port: The port there.
        deadline: Of the public call.
        waits: Try until the deadline where nobody listens.

    Raises:
        MessageError: `address` is no address.
        PeerLost: Nobody listens there.
        DeadlineExceeded: The deadline passed.
    """
    while True:
        try:
            return _connect(address, port, deadline)
        except PeerLost:
            if not waits or deadline.remaining() < AGAIN_SECONDS:
                raise
        deadline.sleep(AGAIN_SECONDS)


def _connect(address: str, port: int, deadline: Deadline) -> socket.socket:
    where = f"{address}:{port}"
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MessageError(f"{where} is no address: {error}") from error
    reason = 0
    for family, kind, protocol, _, target in found:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            while (reason := sock.connect_ex(target)) in (errno.EINPROGRESS, errno.EALREADY):
                deadline.check(f"connecting to {where}")
                deadline.sleep(_POLL_SECONDS)
        except BaseException:
            sock.close()
            raise
        if reason in (0, errno.EISCONN):
            return sock
        sock.close()
    raise PeerLost(f"cannot connect to {where} ({os.strerror(reason)}): the trainer is gone, or {WRONG_ADDRESS}")
