"""Trainer ranks and servers of one check, in processes of their own, and what every check asks of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weightwire.clients.fanout import FanoutClient
from weightwire.testing.conformance import ranks as remote
from weightwire.testing.conformance.judging import Nonconforming
from weightwire.testing.conformance.payloads import Payload
from weightwire.testing.conformance.ranks import Opening
from weightwire.testing.conformance.source import Owners
from weightwire.testing.conformance.subject import TransportUnderTest
from weightwire.testing.pool_call import PendingCall, RankDied
from weightwire.testing.pool_process import Rank
from weightwire.testing.workers import RankClient

SECONDS = 90.0
"""How long anything may take before it counts as hanging."""

PEER_TIMEOUT = 3.0
"""Seconds of silence after which a rank counts as stopped, in checks of ranks that do."""


@contextlib.contextmanager
def nonconforming(what: str) -> Iterator[None]:
    """Have whatever goes wrong count against the transport: `what` failed, and why."""
    try:
        yield
    except Nonconforming:
        raise
    except RankDied as error:
        raise Nonconforming(f"{what} took its process down: {error}") from error
    except Exception as error:
        raise Nonconforming(f"{what} failed: {type(error).__name__}: {error}") from error


class Stage:
    """What a check works with: the transport, and processes to run it in.

    Args:
        subject: The transport.
        lend: Lends clean ranks until the check is over.
    """

    def __init__(self, subject: TransportUnderTest, lend: Callable[[int], list[Rank]]) -> None:
        self.subject = subject
        self.lend = lend

    def scene(self, payload: Payload, **options: Any) -> Scene:
        """Trainer ranks and servers with an open link; see `Scene`."""
        return Scene(self, payload, **options)

    def impatience(self) -> dict[str, Any]:
        """Fields of the init info with which a rank that stops is missed after `PEER_TIMEOUT`."""
        return {"peer_timeout": PEER_TIMEOUT, **self.subject.impatience}


class Scene:
    """M trainer ranks and some servers, linked.

    Args:
        stage: What lends the ranks.
        payload: What is sent.
        trainers: Number of trainer ranks.
        servers: Worker ranks of each server.
        owners: Who owns which parameter.
        scope: The source's scope.
        whole: Whether the source offers all tensors at once.
        holds: What the workers' models hold, if that is more than is sent.
        behind: Makes the client that the trainer drives from those of the servers.
        opened: Open the link now.
        fields: Further fields of the init info.

    Attributes:
        held: The version that all workers are known to hold; they begin with 0.
    """

    def __init__(
        self,
        stage: Stage,
        payload: Payload,
        *,
        trainers: int = 1,
        servers: Sequence[int] = (1,),
        owners: Owners | None = None,
        scope: str = "full",
        whole: bool = False,
        holds: Payload | None = None,
        behind: Callable[[list[RankClient]], FanoutClient] = FanoutClient,
        opened: bool = True,
        **fields: Any,
    ) -> None:
        self.stage = stage
        self.payload = payload
        self.model = holds or payload
        self.held = 0
        self.opening = Opening(stage.subject, payload, trainers, owners, scope, whole, fields)
        lent = stage.lend(trainers + sum(servers))
        self.trainers, self.workers = lent[:trainers], lent[trainers:]
        self._behind = behind
        self.clients: list[RankClient] = []
        rest = list(self.workers)
        for count in servers:
            mine, rest = rest[:count], rest[count:]
            self.clients.append(self._host(mine))
        self.client = behind(self.clients)
        if opened:
            self.open()

    def _host(self, ranks: Sequence[Rank]) -> RankClient:
        with nonconforming("making a worker"):
            addresses = [
                rank.call(remote.host_payload, self.stage.subject, self.model, self.held, place, len(ranks))
                for place, rank in enumerate(ranks)
            ]
        labels = [f"worker rank {self.workers.index(rank)} (pid {rank.pid})" for rank in ranks]
        return RankClient(addresses, labels)

    def open(self) -> None:
        """Make the engines of all trainer ranks."""
        with nonconforming("trainer_init"):
            for call in self.start_open():
                call.result(SECONDS)

    def start_open(self) -> list[PendingCall[None]]:
        """Make them, without waiting."""
        port = self.trainers[0].call(remote.hold_port) if len(self.trainers) > 1 else 0
        return [
            rank.start(remote.open_trainer, self.opening, self.client, self.held, place, port)
            for place, rank in enumerate(self.trainers)
        ]

    def replace_trainers(self, ranks: Sequence[Rank]) -> None:
        """Have other ranks be the trainers, and open a link."""
        self.trainers = list(ranks)
        self.open()

    def replace_worker(self, place: int) -> None:
        """Have a new rank host the `place`-th server, which has one rank; it begins with version `held`."""
        (self.workers[place],) = self.stage.lend(1)
        self.clients[place] = self._host([self.workers[place]])

    def reopen(self, workers: Sequence[Rank] | None = None) -> None:
        """Shut the trainers down and open a new link, to the servers (of one rank each) of `workers`, or to all."""
        self.close()
        self.client = self._client_of(self.workers if workers is None else workers)
        self.open()

    def close(self) -> None:
        """Shut the trainers down."""
        with nonconforming("shutdown"):
            for call in [rank.start(remote.close_trainer) for rank in self.trainers]:
                call.result(SECONDS)

    def only(self, workers: Sequence[Rank]) -> None:
        """After the link was lost: have the next one be to the servers (of one rank each) of `workers`."""
        for rank in self.trainers:
            rank.call(remote.drive, self._client_of(workers))

    def _client_of(self, workers: Sequence[Rank]) -> FanoutClient:
        if list(workers) == self.workers:
            return self._behind(self.clients)
        return self._behind([self.clients[self.workers.index(rank)] for rank in workers])

    def send(self, version: int, **options: Any) -> list[PendingCall[dict[str, Any]]]:
        """Start a round on every trainer rank."""
        return [rank.start(remote.send, version, **options) for rank in self.trainers]

    def push(self, version: int, *, to: Sequence[Rank] | None = None, **options: Any) -> dict[str, Any]:
        """Send `version` and hold it against what every worker then has; returns rank 0's report."""
        with nonconforming(f"send_weights of update {version}"):
            reports = [call.result(SECONDS) for call in self.send(version, **options)]
        self.check_new(self.workers if to is None else to, version)
        self.held = version
        return reports[0]

    def check_new(self, workers: Sequence[Rank], version: int) -> None:
        """Hold the workers' models against `version`."""
        for rank in workers:
            complaints = rank.call(remote.judged, self.payload, version, self.held)
            if complaints:
                raise Nonconforming(f"{self.label(rank)} after update {version}: {'; '.join(complaints)}")

    def check_old(self, workers: Sequence[Rank], version: int, *, after: str, seconds: float = 2.0) -> None:
        """Check that `update version` left nothing behind: idle, whole, and every byte as before."""
        for rank in workers:
            self.settle(rank, after=after, seconds=seconds)
            if rank.call(remote.info)["weights"] != "whole":
                raise Nonconforming(f"{self.label(rank)} calls its weights torn {after}")
            if found := rank.call(remote.mixed, self.model, self.held, version):
                raise Nonconforming(f"{self.label(rank)} {after}: {found}")

    def settle(self, rank: Rank, *, after: str, seconds: float = 2.0) -> None:
        """Wait until a worker has no update on."""
        until = time.monotonic() + seconds
        while (state := rank.call(remote.info)["update"]) != "none":
            if time.monotonic() > until:
                raise Nonconforming(f"{self.label(rank)} is still {state} {seconds:g} s {after}:\n{rank.stacks()}")
            time.sleep(0.02)

    def error_of(self, call: PendingCall[Any], what: str, seconds: float = SECONDS) -> BaseException:
        """The error that `call` has to raise within `seconds`."""
        try:
            error = call.exception(seconds)
        except TimeoutError as slow:
            raise Nonconforming(f"{what}: send_weights did not end within {seconds:g} s; {slow}") from slow
        if error is None:
            raise Nonconforming(f"{what}: send_weights returned as if nothing had happened; the error was swallowed")
        return error

    def label(self, rank: Rank) -> str:
        """A rank as messages name it."""
        if rank in self.workers:
            return f"worker rank {self.workers.index(rank)}"
        return f"trainer rank {self.trainers.index(rank)}"


def require_words(error: object, words: Sequence[str], what: str) -> None:
    """Check that an error's text has all of `words`."""
    text = str(error)
    missing = [word for word in words if word not in text]
    if missing:
        raise Nonconforming(f"{what}: the error does not say {missing[0]!r}; it says: {type(error).__name__}: {text}")
