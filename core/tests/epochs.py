"""Members of one epoch in this process, for tests; each call of each member in a thread of its own."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from weightwire.deadline import Deadline
from weightwire.rendezvous import Outcome, Rendezvous

SECRET = bytes(range(16))
LIMIT = 20.0
"""Seconds after which a test has failed; nothing that works comes near it."""


def open_epoch(*, trainers: int = 1, workers: int, epoch: int = 1, **options: Any) -> Rendezvous:
    return Rendezvous.host(trainers=trainers, workers=workers, secret=SECRET, epoch=epoch, **options)


def join(port: int, rank: int, *, epoch: int = 1, secret: bytes = SECRET, seconds: float = LIMIT) -> Rendezvous:
    return Rendezvous.join(
        address="127.0.0.1", port=port, rank=rank, secret=secret, epoch=epoch, deadline=Deadline(seconds)
    )


class Epoch:
    """A host and all other members, joined.

    Attributes:
        members: By member rank.
    """

    def __init__(self, *, trainers: int = 1, workers: int = 2, **options: Any) -> None:
        self.members = [open_epoch(trainers=trainers, workers=workers, **options)]
        self.members += [join(self.members[0].port, rank) for rank in range(1, trainers + workers)]
        self._threads = ThreadPoolExecutor(2 * len(self.members))

    def __enter__(self) -> Epoch:
        return self

    def __exit__(self, *raised: object) -> None:
        for member in reversed(self.members):
            member.close()
        self._threads.shutdown()

    def start(self, rank: int, call: Callable[[Rendezvous], Any]) -> Future[Any]:
        return self._threads.submit(call, self.members[rank])

    def exchange(self, rank: int, phase: str, *, seconds: float = LIMIT, **content: Any) -> Future[Outcome]:
        deadline = Deadline(seconds)
        return self.start(rank, lambda member: member.exchange(phase, deadline=deadline, **content))

    def all_exchange(self, phase: str, contents: dict[int, dict[str, Any]] | None = None) -> list[Outcome]:
        """Everybody's outcome of one exchange; `contents` says what who posts."""
        waiting = [self.exchange(rank, phase, **(contents or {}).get(rank, {})) for rank in range(len(self.members))]
        return [future.result(LIMIT) for future in waiting]


def error_of(future: Future[Any]) -> BaseException:
    error = future.exception(LIMIT)
    assert error is not None, f"returned {future.result()}"
    return error


class RawMember:
    """A member made by hand, which says what it is told to."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)

    def __enter__(self) -> RawMember:
        return self

    def __exit__(self, *raised: object) -> None:
        self.socket.close()

    def say(self, **frame: Any) -> None:
        body = json.dumps(frame).encode()
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def hello(self, rank: int, **changes: Any) -> dict[str, Any]:
        """Introduce itself; what it is answered."""
        hello = {"hello": SECRET.hex(), "rank": rank, "pid": os.getpid(), "epoch": 1, "protocol": 1}
        self.say(type="hello", **{**hello, **changes})
        return self.hear()

    def post(self, phase: str, *, gather: bool = False) -> None:
        content: dict[str, Any] = {"agree": {}, "payload": None, "error": None, "gather": gather, "waits": True}
        self.say(type="post", id=phase, phase=phase, **content)

    def hear(self) -> dict[str, Any]:
        """The next frame that is not a heartbeat."""
        while True:
            (size,) = struct.unpack(">I", self._read(4))
            frame: dict[str, Any] = json.loads(self._read(size))
            if frame["type"] != "ping":
                return frame

    def is_dropped(self) -> bool:
        """Wait until the other side has ended the connection."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            assert more, "the connection ended"
            data += more
        return data
