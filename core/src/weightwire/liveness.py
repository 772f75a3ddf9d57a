"""Whether the peers of a communicator are alive: a TCP connection to each, silent until the end.

gloo does not notice a peer that dies in the middle of a message; the kernel closes the dead process's connection
within a tenth of a second. Nobody waits on these connections: whoever waits for bytes calls `poll` now and then.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import selectors
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, PeerFailed, PeerLost, TransferError

LEFT = b"L"
"""Last word of a peer that closed its communicator in order."""
GAVE_UP = b"G"
"""Last word of a peer whose side of the transfer failed."""

_NONCE_BYTES = 16
_HELLO_BYTES = _NONCE_BYTES + 4
_STORE_INTERVAL = 0.005
_CONNECT_SECONDS = 1.0


class Liveness:
    """The connections to all peers.

    Args:
        store: A `torch.distributed.Store` all of them share.
        rank: This process in the communicator.
        peers: Whom to connect to; the relation is symmetric.
        labels: Every rank in words.
        hostname: Address to listen on, and where the peers reach this process.
        deadline: By when all peers must be connected.

    Raises:
        DeadlineExceeded: Names the peers that did not come.
        TransferError: `hostname` cannot be bound to.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        peers: Iterable[int],
        labels: Sequence[str],
        hostname: str,
        deadline: Deadline,
    ) -> None:
        self._labels = labels
        self._rank = rank
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._by_descriptor: dict[int, int] = {}
        self._last_words: dict[int, bytes] = {}
        meeting = _Meeting(store, rank, set(peers), hostname)
        try:
            self._connections = meeting.hold(deadline)
        except DeadlineExceeded:
            missing = ", ".join(labels[peer] for peer in sorted(meeting.missing))
            raise DeadlineExceeded(
                f"{missing} did not connect within {deadline.seconds:g} s", rank=labels[rank]
            ) from None
        for peer, connection in self._connections.items():
            self._poll.register(connection, select.POLLIN)
            self._by_descriptor[connection.fileno()] = peer

    def poll(self, milliseconds: int = 0) -> None:
        """Take note of who has left; waits up to `milliseconds` for news."""
        with self._lock:
            for descriptor, _ in self._poll.poll(milliseconds):
                peer = self._by_descriptor.pop(descriptor)
                self._poll.unregister(descriptor)
                try:
                    self._last_words[peer] = self._connections[peer].recv(1)
                except OSError:
                    self._last_words[peer] = b""

    def failure(self, peer: int) -> TransferError | None:
        """Why nothing more will come from or go to `peer`; None while it is there."""
        if (word := self._last_words.get(peer)) is None:
            return None
        label, where = self._labels[peer], self._labels[self._rank]
        if word == GAVE_UP:
            return PeerFailed(f"{label} gave up the transfer", rank=where)
        if word == LEFT:
            return PeerLost(f"{label} closed its communicator", rank=where)
        return PeerLost(f"{label} was lost during the transfer: its connection closed", rank=where)

    def close(self, word: bytes) -> None:
        """Say the last word and hang up; idempotent."""
        with self._lock:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):  # a peer that has left needs no word
                    connection.send(word)
                connection.close()
            self._connections = {}
            self._by_descriptor = {}
            self._poll = select.poll()


class _Meeting:
    """Connects a process to its peers: of two, the one with the lower rank listens."""

    def __init__(self, store: Any, rank: int, peers: set[int], hostname: str) -> None:
        self._store = store
        self._rank = rank
        self._hostname = hostname
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._below = {peer for peer in peers if peer < rank}
        self._above = {peer for peer in peers if peer > rank}
        self._selector = selectors.DefaultSelector()
        self._connected: dict[int, socket.socket] = {}

    @property
    def missing(self) -> set[int]:
        return (self._below | self._above) - self._connected.keys()

    def hold(self, deadline: Deadline) -> dict[int, socket.socket]:
        try:
            if self._above:
                self._listen()
            while self.missing:
                deadline.check()
                self._call(self._below - self._connected.keys())
                for key, _ in self._selector.select(_STORE_INTERVAL):
                    key.data(key.fileobj)
        except BaseException:
            for connection in self._connected.values():
                connection.close()
            raise
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
        return self._connected

    def _key(self, rank: int) -> str:
        return f"liveness/{rank}"

    def _listen(self) -> None:
        try:
            family, kind, _, _, address = socket.getaddrinfo(self._hostname, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind)
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            raise TransferError(f"cannot listen on {self._hostname!r}: {error}") from error
        record = {"address": listener.getsockname()[:2], "nonce": self._nonce.hex()}
        self._store.set(self._key(self._rank), json.dumps(record))

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # the caller has already hung up
        connection.setblocking(False)
        said = bytearray()

        def listen(connection: socket.socket) -> None:
            try:
                part = connection.recv(_HELLO_BYTES - len(said))
            except OSError:
                part = b""
            said.extend(part)
            if part and len(said) < _HELLO_BYTES:
                return
            self._selector.unregister(connection)
            peer = int.from_bytes(said[_NONCE_BYTES:], "big")
            proven = secrets.compare_digest(bytes(said[:_NONCE_BYTES]), self._nonce)
            if proven and len(said) == _HELLO_BYTES and peer in self._above & self.missing:
                self._connected[peer] = connection
            else:
                connection.close()

        self._selector.register(connection, selectors.EVENT_READ, listen)

    def _call(self, peers: set[int]) -> None:
        for peer in peers:
            if self._store.check([self._key(peer)]):
                record = json.loads(self._store.get(self._key(peer)))
                hello = bytes.fromhex(record["nonce"]) + self._rank.to_bytes(4, "big")
                self._connect(peer, tuple(record["address"]), hello)

    def _connect(self, peer: int, address: tuple[str, int], hello: bytes) -> None:
        try:
            connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
        except OSError:
            return  # tried again until the deadline
        try:
            connection.sendall(hello)
        except OSError:
            connection.close()
            return
        connection.setblocking(False)
        self._connected[peer] = connection
