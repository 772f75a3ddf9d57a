"""What the ranks of one trainer and its workers agree on, and who of them failed.

Members are the trainer ranks 0..M-1 and then the workers M..M+N-1. Trainer rank 0 hosts: the others hold one TCP
connection to it each, and its own member talks to the hub in the same thread. A process has one daemon thread for
all of it (`loop.py`); the hub (`hub.py`) decides, members ask and wait (`mailbox.py`).

A member is in one of these states, and moves downwards only:

    joining   hello sent, nothing answered
    live      welcomed
    failed    `failure` says why: told by the hub, the connection ended, silence, or this member's own `fail`
    closed    the host ended the epoch in good order; `failure` says so too, and `closed` is true
    left      `close` was called here; calls that wait raise `OrderError`

A public call encodes its frame, hands it to the loop and waits. A reply that came before a failure is still given
to who waits for it. When a deadline passes or is cancelled in an exchange, the member asks the hub to let it go:
the hub has either answered already (then that is the result) or declares the epoch dead. So nobody acts on a vote
that another member has stopped waiting for.

Frames, each a JSON object with a `type`. To the hub: hello, ping, phase, post, give_up, store, forget, fail, bye.
From it: welcome, refused, ping, reply, failed, parted, closed.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final

from weightwire.deadline import Deadline
from weightwire.endpoint import AGAIN_SECONDS, WRONG_ADDRESS, connect, listen
from weightwire.errors import (
    MessageError,
    PeerFailed,
    PeerLost,
    PeerStalled,
    WeightwireError,
    describe,
    error_from_json,
)
from weightwire.exchange import JSON, Outcome, RankError, member_label, posting
from weightwire.frames import Frame, decode, encode
from weightwire.hub import Hub, OwnMember
from weightwire.loop import Connection, Loop
from weightwire.mailbox import Mailbox
from weightwire.parting import Parting
from weightwire.reception import PROTOCOL, SILENT_TICKS, Reception, is_stalled

if TYPE_CHECKING:
    from weightwire.store import RendezvousStore

__all__ = ["JSON", "Outcome", "RankError", "Rendezvous"]

_SECRET_BYTES: Final = 16
_LEAVING_SECONDS: Final = 0.5
_FAIL_SECONDS: Final = 0.2
_DEAD_SECONDS: Final = 0.05
_EXPLAIN_SECONDS: Final = 0.3
_GIVEN_UP_SECONDS: Final = 1.5
"""A rank gives up for a reason; where that is silence, members hear of it up to a beat apart."""
_TRIES: Final = 3


class Rendezvous:
    """One member's end of an epoch. Made by `host` or `join`; every method may be called from any thread.

    Attributes:
        rank: Member rank.
        trainers: Number of trainer ranks.
        workers: Number of workers.
        address: Where the hub listens.
        port: Its port.
        local_address: This machine's address on the way to the hub.
        parting: Who may leave without ending the epoch, and who has.
    """

    def __init__(self, *, rank: int, address: str, port: int, local_address: str) -> None:
        self.rank = rank
        self.trainers = 0
        self.workers = 0
        self.address = address
        self.port = port
        self.local_address = local_address
        self._process = os.getpid()
        self._mailbox = Mailbox(self._post)
        self._numbers = count()
        self._phase = "join"
        self._host_pid = 0
        self._peer_timeout = 0.0
        self._tries = 0.0
        self._patience = 0.0
        self._stores: list[RendezvousStore] = []
        self._loop = Loop(f"weightwire-rendezvous-{rank}", broken=self._broken)
        self._hub: Hub | None = None
        self.parting = Parting(self._loop)
        self._say: Callable[[bytes], object]
        self._leave: Callable[[], object]
        self._beat: Callable[[], object]

    @classmethod
    def host(
        cls,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        listen_socket: socket.socket | None = None,
        trainers: int,
        workers: int,
        secret: bytes,
        epoch: int,
        peer_timeout: float = 10.0,
    ) -> Rendezvous:
        """Open an epoch, as trainer rank 0. The port is bound and listening when this returns.

        Args:
            address: Where to listen, and nowhere else.
            port: 0 lets the system choose.
            listen_socket: A listening socket to use instead; owned from now on.
            trainers: Number of trainer ranks, at least 1.
            workers: Number of workers.
            secret: 16 bytes that every member has to know.
            epoch: Number of the epoch; a member of another one is refused.
            peer_timeout: Seconds of silence after which a member counts as stalled.

        Raises:
            MessageError: An argument is out of range, or the address is not of this machine.
            Busy: Somebody else listens there.
        """
        if len(secret) != _SECRET_BYTES or trainers < 1 or workers < 0 or peer_timeout <= 0:
            raise MessageError(
                f"a rendezvous needs {_SECRET_BYTES} bytes of secret ({len(secret)} given), a trainer rank "
                f"({trainers}), no negative number of workers ({workers}), a positive peer timeout ({peer_timeout})"
            )
        listener = listen_socket or listen(address, port)
        bound = listener.getsockname()
        local_address = address if bound[0] in ("0.0.0.0", "::") else bound[0]
        self = cls(rank=0, address=address, port=bound[1], local_address=local_address)
        self._hub = self.parting.hub = hub = Hub(trainers=trainers, workers=workers, peer_timeout=peer_timeout)
        self._say = lambda frame: hub.receive(0, decode(frame))
        self._leave = Reception(self._loop, listener, hub, secret=secret, epoch=epoch).close
        hub.admit(0, os.getpid(), OwnMember(self._receive))
        self._loop.start()
        return self

    @classmethod
    def join(
        cls,
        *,
        address: str,
        port: int,
        rank: int,
        secret: bytes,
        epoch: int,
        deadline: Deadline,
        pid: int | None = None,
        host_comes: bool = False,
    ) -> Rendezvous:
        """Join the epoch that trainer rank 0 hosts; waits for it while the one before is still coming down.

        Args:
            address: Where it listens.
            port: Its port.
            rank: This process's member rank.
            secret: 16 bytes, as given to `host`.
            epoch: Number of the epoch.
            deadline: Of the public call.
            pid: Process id to report; this process's if None.
            host_comes: Wait for a host until the deadline, where nobody listens or nobody lets this member in.

        Raises:
            Unauthorized: The secret is another.
            HandshakeError: Another epoch or protocol, no such rank, or the rank is taken.
            PeerLost: Nobody listens there, or the connection ended.
            DeadlineExceeded: The deadline passed.
            WeightwireError: The epoch has failed already, for this reason.
        """
        hello = {"hello": secret.hex(), "rank": rank, "pid": pid or os.getpid(), "epoch": epoch}
        data = encode({"type": "hello", **hello, "protocol": PROTOCOL})
        for attempt in count(1):
            sock = connect(address, port, deadline, waits=host_comes)
            self = cls(rank=rank, address=address, port=port, local_address=sock.getsockname()[0])
            self._patience = math.inf if host_comes else _TRIES
            try:
                self._greet(sock, data, deadline)
                break
            except BaseException as error:
                self.close()
                over = isinstance(error, PeerLost) and deadline.remaining() < AGAIN_SECONDS
                if over or attempt >= self._tries:
                    raise
                deadline.sleep(AGAIN_SECONDS)
        return self

    @property
    def is_host(self) -> bool:
        """Whether this is trainer rank 0."""
        return self.rank == 0

    @property
    def failure(self) -> WeightwireError | None:
        """Why this epoch is dead, or None while it is not. The first reason stays."""
        return self._mailbox.failure

    @property
    def failed_rank(self) -> int | None:
        """The member rank that `failure` is about, if it is about one."""
        return self._mailbox.failed_rank

    @property
    def closed(self) -> bool:
        """Whether the host ended the epoch in good order: a member's link is down, and nothing went wrong."""
        return self._mailbox.closed

    def label(self, rank: int | None = None) -> str:
        """`"trainer rank 0"` or `"worker rank 1"`, for a member rank; this member's own if None."""
        return member_label(self.rank if rank is None else rank, self.trainers)

    @property
    def absent(self) -> tuple[int, ...]:
        """Member ranks that have neither joined nor been told that it is too late; only the host knows."""
        return () if self._hub is None else self._hub.absent

    def exchange(
        self,
        phase: str,
        *,
        deadline: Deadline,
        agree: Mapping[str, JSON] | None = None,
        payload: JSON = None,
        error: WeightwireError | None = None,
        gather: bool = False,
    ) -> Outcome:
        """Meet all members: returns once every one has posted to `phase`, also those that failed.

        Args:
            phase: Its name; never used twice in an epoch.
            deadline: Of the public call.
            agree: What has to be equal on all members that give the key.
            payload: For those that gather.
            error: What went wrong here. A payload over 64 MiB becomes such an error.
            gather: Whether this member wants everybody's payload.

        Raises:
            DeadlineExceeded: Not everybody came in time; says who did not. The epoch is dead for all.
            PeerLost: A member died, stalled or left; or the trainer closed the epoch.
            PeerFailed: A member called `fail`, or stopped waiting for this exchange.
            WeightwireError: What the deadline was cancelled with (the epoch is dead for all), or this member's
                own failure.
            OrderError: `close` was called here.
        """
        self._phase = phase
        request, error = posting(phase, agree=agree or {}, payload=payload, error=error, gather=gather, waits=True)
        regret = {"type": "give_up", "id": phase, "phase": phase}
        what = f"exchange {phase!r}"
        reply = self._mailbox.ask(phase, request, regret=regret, deadline=deadline, what=what)
        return Outcome.from_frame(reply, phase=phase, trainers=self.trainers, own=error)

    def post(self, phase: str, *, payload: JSON = None) -> None:
        """Take part in an exchange that the others wait for, without waiting for its outcome."""
        self._phase = phase
        self._post(posting(phase, agree={}, payload=payload, error=None, gather=False, waits=False)[0])

    def fail(self, error: WeightwireError) -> None:
        """Declare the epoch dead: everybody who waits raises `error` in its own words, with this member's name.

        Returns once the words are on their way, in 0.2 s at the latest. Does nothing if the epoch is dead.
        """
        if self._mailbox.die(error, rank=self.rank):
            sent = threading.Event()
            self._post(encode({"type": "fail", "error": error.to_json()}), sent.set)
            sent.wait(_FAIL_SECONDS)

    def explain(self, error: BaseException) -> BaseException:
        """What happened, in the words of this rendezvous if it knows better than the data plane.

        The data plane names a rank whose connection broke, or one that gave up because another failed; the rendezvous
        knows who it was, its process and what it was doing, and hears of it within a moment.
        """
        if not isinstance(error, PeerLost | PeerFailed) or isinstance(error, PeerStalled):
            return error
        self._mailbox.wait_dead(_GIVEN_UP_SECONDS if isinstance(error, PeerFailed) else _EXPLAIN_SECONDS)
        failure = self._mailbox.failure
        return error if failure is None or self.closed else failure

    def watch(self, deadline: Deadline) -> AbstractContextManager[None]:
        """While the block runs, a failure of this epoch cancels `deadline`; one that was before, at once."""
        return self._mailbox.watch(deadline)

    def when_dead(self, callback: Callable[[], object]) -> None:
        """Call `callback` once when this epoch has died or was closed; it must not block, nor call `close`."""
        self._mailbox.on_death = callback
        if self.failure is not None:
            callback()

    def note_phase(self, name: str) -> None:
        """Say what this member does now, for the message that names it should it die."""
        self._phase = name
        self._post(encode({"type": "phase", "name": name}))

    def store(self, prefix: str, deadline: Deadline, *, ranks: Sequence[int] | None = None) -> RendezvousStore:
        """A `torch.distributed.Store` that all members share, enough for gloo and NCCL to bootstrap on.

        Args:
            prefix: Stores of one prefix share their keys.
            deadline: Ends every wait.
            ranks: Member ranks that use it, so that a wait can say who has not come; all if None.
        """
        from weightwire.store import RendezvousStore

        store = RendezvousStore(self._ask_store, prefix=prefix, deadline=deadline, ranks=ranks)
        # torch's C++ keeps only its own half of a store written in Python.
        self._stores.append(store)
        return store

    def close(self) -> None:
        """Leave in good order; the host ends the epoch for all. Takes less than 1 s, and may be called again.

        A dead epoch is left without waiting: whoever raises its failure is not held up by a peer that is stopped.
        """
        if os.getpid() != self._process:
            return  # a fork: the thread and the connections are the parent's
        if self._mailbox.leave():
            self._loop.call(self._part)
        self._loop.join(2 * _LEAVING_SECONDS if self.failure is None else _DEAD_SECONDS)

    def _greet(self, sock: socket.socket, hello: bytes, deadline: Deadline) -> None:
        connection = Connection(self._loop, sock, on_frame=self._receive, on_end=self._lose_host)
        self._say = connection.send
        self._leave = partial(connection.finish, encode({"type": "bye"}))
        self._beat = partial(self._expect_beat, connection)
        connection.send(hello)
        self._loop.start()
        self._mailbox.wait_opened(deadline, f"joining trainer rank 0 at {self.address}:{self.port}")

    def _ask_store(self, request: Frame, deadline: Deadline, what: str, limit: float | None) -> JSON:
        number = next(self._numbers)
        regret = {"type": "forget", "id": number, "prefix": request["prefix"], "ranks": request["ranks"]}
        data = encode({"type": "store", "id": number, **request})
        reply = self._mailbox.ask(number, data, regret=regret, deadline=deadline, what=what, limit=limit)
        if "error" in reply:
            raise error_from_json(reply["error"])
        return reply["result"]

    def _post(self, frame: bytes, sent: Callable[[], object] = bool) -> None:
        self._loop.call(lambda: (self._say(frame), sent()))

    # What follows runs on the loop's thread.

    def _receive(self, frame: Frame) -> None:
        match frame["type"]:
            case "welcome":
                self._enter(frame)
            case "reply":
                self._mailbox.put(frame["id"], frame)
            case "refused":
                self._tries = math.inf if frame["again"] else 0
                self._mailbox.die(error_from_json(frame["error"]))
            case "failed":
                self._mailbox.die(error_from_json(frame["error"]), rank=frame["rank"])
            case "parted":
                self.parting.hear(frame)
            case "closed" if not self.is_host:
                self._mailbox.die(PeerLost("the trainer closed this epoch"), closed=True)
                self._leave()

    def _enter(self, welcome: Frame) -> None:
        self.trainers, self.workers = welcome["trainers"], welcome["workers"]
        self._host_pid, self._peer_timeout = welcome["pid"], welcome["peer_timeout"]
        if not self.is_host:
            self._loop.every(self._peer_timeout / SILENT_TICKS, self._beat)
        self._mailbox.open()

    def _expect_beat(self, connection: Connection) -> None:
        if is_stalled(connection):
            silence = f"{self._host()} has said nothing for {self._peer_timeout:g} s, during {self._phase}"
            self._mailbox.die(PeerStalled(f"{silence}: it is stopped, or cannot be reached"), rank=0)

    def _lose_host(self, why: str) -> None:
        if self._mailbox.opened:
            error = PeerLost(f"{self._host()} was lost during {self._phase}: {why}")
        else:
            # A listener that changes hands between two epochs drops whoever came too early.
            self._tries = self._patience if self._mailbox.failure is None else self._tries
            error = PeerLost(f"{self.address}:{self.port} did not let this member in: {why}; {WRONG_ADDRESS}")
        if not self._mailbox.left:
            self._mailbox.die(error, rank=0)
        self._loop.finish(0.0)

    def _host(self) -> str:
        return f"{self.label(0)} (pid {self._host_pid})"

    def _part(self) -> None:
        self._leave()
        self._loop.finish(_LEAVING_SECONDS)

    def _broken(self, error: Exception) -> None:
        self._mailbox.die(describe(error, rank=self.label()))
