"""A rank's connection to its front: it joins by it, asks by it before a commit, and ends when it ends.

JSON lines over a Unix socket. From the rank: `join`, `ready`, `blocked`, `ask`; from the front: `welcome` or
`refused`, and `answer`. This module imports no torch, so that a rank hangs on its front before it loads anything.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, Literal

from weightwire.deadline import Deadline
from weightwire.errors import HandshakeError, PeerLost, WeightwireError, error_from_json
from weightwire.gate import Gate
from weightwire.session import UpdateState
from weightwire_server.private_directory import PrivateDirectory

Asking = Literal["committing", "receiving", "resetting"]

_RETRY_SECONDS = 0.05
_HELLO_SECONDS = 5.0


class Lifeline:
    """Joins the front; `ended` is called in a thread once the front is gone.

    Args:
        directory: Where the front is.
        rank: This rank.
        world_size: Ranks of the server.
        deadline: How long to wait for the front to be there.
        ended: What to do without a front.

    Raises:
        HandshakeError: The front does not take this rank.
        DeadlineExceeded: There was no front in time.
    """

    def __init__(
        self,
        directory: PrivateDirectory,
        *,
        rank: int,
        world_size: int,
        deadline: Deadline,
        ended: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.directory = directory
        self._condition = threading.Condition()
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._asked = 0
        self._closed = False
        self._lost = False
        self._ended = ended
        self._socket = self._joined(world_size, deadline)
        threading.Thread(target=self._listen, name="weightwire-lifeline", daemon=True).start()

    def _joined(self, world_size: int, deadline: Deadline) -> socket.socket:
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(_HELLO_SECONDS)
            try:
                secret = self.directory.secret()
                connection.connect(str(self.directory.front))
                hello = {"secret": secret, "rank": self.rank, "world_size": world_size, "pid": os.getpid()}
                connection.sendall(json.dumps({"join": hello}).encode() + b"\n")
                reply = _line(connection)
            except OSError:
                connection.close()
                deadline.sleep(_RETRY_SECONDS)  # it is not there yet
                continue
            if "welcome" not in reply:
                connection.close()
                raise HandshakeError(f"the front does not take this rank: {reply.get('refused')}")
            connection.settimeout(None)
            return connection

    def tell(self, **frame: Any) -> None:
        """Send a frame; a front that is gone is noticed by the listening thread."""
        with self._condition:
            try:
                self._socket.sendall(json.dumps(frame).encode() + b"\n")
            except OSError:
                self._lost = True

    def ask(self, why: Asking, deadline: Deadline) -> None:
        """Wait for the front's leave.

        Raises:
            WeightwireError: Why it does not give it.
            PeerLost: The front is gone.
            DeadlineExceeded: It did not answer.
        """
        with self._condition:
            self._asked += 1
            number = self._asked
            self._answers[number] = None
        self.tell(ask=number, why=why)
        with self._condition:
            try:
                deadline.wait_for(lambda: self._lost or self._answers[number] is not None, self._condition)
            finally:
                answer = self._answers.pop(number)
        if answer is None:
            raise PeerLost("the front of this rank is gone")
        if answer["error"] is not None:
            raise error_from_json(answer["error"])

    def close(self) -> None:
        """Leave the front; idempotent."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was faster

    def _listen(self) -> None:
        with self._socket, self._socket.makefile("rb") as lines:
            for line in lines:
                frame = json.loads(line)
                with self._condition:
                    if frame["answer"] in self._answers:
                        self._answers[frame["answer"]] = frame
                        self._condition.notify_all()
        with self._condition:
            self._lost = True
            self._condition.notify_all()
        if not self._closed:
            self._ended()


def _line(connection: socket.socket) -> dict[str, Any]:
    received = b""
    while not received.endswith(b"\n"):
        if not (more := connection.recv(1)):
            raise ConnectionError("the front closed the connection")
        received += more
    reply: dict[str, Any] = json.loads(received)
    return reply


class RankGate(Gate):
    """The gate of a rank whose readers are at the front: it asks there before a commit, and says when none may read.

    Args:
        lifeline: The way to the front.
        update: Tells the state of the worker's update.
    """

    def __init__(self, lifeline: Lifeline, update: Callable[[], UpdateState]) -> None:
        super().__init__()
        self._lifeline = lifeline
        self._update = update
        self._told: str | None = None

    def block(self, factory: Callable[[], BaseException] | None) -> None:
        """As `Gate.block`, at the front too."""
        super().block(factory)
        words = None
        if factory is not None:
            error = factory()
            words = error.message if isinstance(error, WeightwireError) else str(error)
        if words != self._told:
            self._told = words
            self._lifeline.tell(blocked=words)

    def close(self, deadline: Deadline) -> None:
        """As `Gate.close`, once the front's readers are out."""
        update = self._update()
        why: Asking = update if update == "committing" or update == "receiving" else "resetting"
        self._lifeline.ask(why, deadline)
        super().close(deadline)
