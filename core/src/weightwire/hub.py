"""The state of one epoch, kept at trainer rank 0.

A hub knows no sockets and no clock: it is told what members say and when they go, and answers through their
channels. It lives on one thread.

    member   absent -> present -> left     left: it said bye
    epoch    open -> failed                the first reason stays, and is told to everybody at once
             open -> closed                trainer rank 0 said bye

             a group that may part is left out of an epoch that stays open: see `weightwire.parting`

The epoch fails when a member says so, is lost, falls silent, has left and is waited for, or gives up waiting for an
exchange: an exchange that is not answered by then never is. It is answered once every member of the world has
posted, to all in one step, and in each channel the answer stays ahead of a later failure. So whoever gives up hears
whether it was decided before, and an exchange may serve as the vote of a two-phase commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weightwire.errors import (
    DeadlineExceeded,
    HandshakeError,
    PayloadTooLarge,
    PeerFailed,
    PeerLost,
    PeerStalled,
    WeightwireError,
    error_from_json,
)
from weightwire.exchange import member_label, reduce
from weightwire.frames import Frame, decode, encode
from weightwire.keyvalues import KeyValues


class Channel(Protocol):
    """The way to one member."""

    def send(self, frame: bytes) -> None:
        """Send an encoded frame without blocking."""

    def finish(self) -> None:
        """Nothing more will be sent."""


@dataclass(slots=True)
class Member:
    """What the hub knows about one member.

    Attributes:
        pid: Its process id, as it says.
        channel: The way to it.
        phase: What it said last that it does.
        left: It said bye.
    """

    pid: int
    channel: Channel
    phase: str = "join"
    left: bool = False


class Hub:
    """Answers exchanges and store requests, and spreads failures.

    Args:
        trainers: Number of trainer ranks, at least 1.
        workers: Number of workers.
        peer_timeout: Seconds of silence after which a member counts as stalled; told to each.

    Attributes:
        absent: Member ranks that have neither joined nor been told that it is too late. Replaced, never changed, so
            that any thread may read it.
        failure: Why the epoch failed.
    """

    def __init__(self, *, trainers: int, workers: int, peer_timeout: float) -> None:
        self.peer_timeout = peer_timeout
        self.failure: WeightwireError | None = None
        self._closed = False
        self._trainers = trainers
        self._world = range(trainers + workers)
        self._waited_for = set(self._world)
        self._groups: Sequence[frozenset[int]] = ()
        self._least = 0
        self.absent = tuple(self._world)
        self._members: dict[int, Member] = {}
        self._exchanges: dict[str, dict[int, Frame]] = {}
        self._table = KeyValues()

    def admit(self, rank: int, pid: int, channel: Channel) -> None:
        """Take a member in and welcome it.

        Raises:
            HandshakeError: There is no such rank, or it is taken.
            WeightwireError: The epoch has failed, for this reason.
        """
        if self.failure is not None:
            self.absent = tuple(other for other in self.absent if other != rank)
            raise self.failure
        if rank not in self._world:
            workers = len(self._world) - self._trainers
            world = f"{self._trainers} trainer ranks and {workers} workers"
            raise HandshakeError(f"member rank {rank} is outside this world of {world}")
        if rank in self._members:
            state = "has left this epoch; join the next" if self._members[rank].left else "is already here"
            raise HandshakeError(f"{self._name(rank)} {state}")
        self._members[rank] = Member(pid, channel)
        self.absent = tuple(other for other in self._world if other not in self._members)
        workers = len(self._world) - self._trainers
        welcome = {"trainers": self._trainers, "workers": workers, "pid": self._members[0].pid}
        channel.send(encode({"type": "welcome", **welcome, "peer_timeout": self.peer_timeout}))

    def receive(self, rank: int, frame: Frame) -> None:
        """Act on what a member says; once the epoch has failed only its leaving counts."""
        if frame["type"] == "bye":
            self._leave(rank)
        if self.failure is not None or self._closed or rank not in self._waited_for:
            return
        match frame["type"]:
            case "phase":
                self._members[rank].phase = frame["name"]
            case "post":
                self._post(rank, frame)
            case "store":
                self._serve(rank, frame)
            case "give_up":
                self._give_up(rank, frame)
            case "forget":
                self._forget(rank, frame)
            case "fail":
                self.fail(self._told_by(rank, error_from_json(frame["error"])), rank=rank)

    def lose(self, rank: int, why: str) -> None:
        """The connection of `rank` ended."""
        member = self._members[rank]
        if not member.left and rank in self._waited_for:
            self.fail(PeerLost(f"{self._name(rank)} was lost during {member.phase}: {why}"), rank=rank)

    def stall(self, rank: int) -> None:
        """Nothing came from `rank` for `peer_timeout` seconds."""
        member = self._members[rank]
        if member.left or rank not in self._waited_for:
            return
        silence = f"{self._name(rank)} has said nothing for {self.peer_timeout:g} s, during {member.phase}"
        self.fail(PeerStalled(f"{silence}: it is stopped, or cannot be reached"), rank=rank)

    def fail(self, error: WeightwireError, *, rank: int | None = None) -> None:
        """The epoch is dead from now on, or goes on without a group that may part; everybody is told.

        Nothing happens where it was dead before.

        Args:
            error: The reason.
            rank: The member it is about.
        """
        if self.failure is None and not self._closed and not (rank is not None and self.part(rank, error)):
            self.failure = error
            self._exchanges.clear()
            self._tell(self._members, {"type": "failed", "error": error.to_json(), "rank": rank})

    def allow_parting(self, groups: Sequence[frozenset[int]], least: int) -> None:
        """Let the epoch go on without some of `groups`, as long as `least` of them stay."""
        self._groups, self._least = groups, least

    def part(self, rank: int, error: WeightwireError) -> bool:
        """Go on without the group of `rank`, if that is allowed; whether the epoch does."""
        staying = [group for group in self._groups if group <= self._waited_for]
        group = next((group for group in staying if rank in group), None)
        if self.failure is not None or self._closed or group is None or len(staying) <= self._least:
            return False
        self._waited_for -= group
        for member in group:
            self._table.forget(member)
        self._tell(group, {"type": "failed", "error": error.to_json(), "rank": rank})
        self._tell(self._waited_for, {"type": "parted", "ranks": sorted(group), "error": error.to_json()})
        for posts in self._exchanges.values():
            for member in group & posts.keys():
                del posts[member]
        for phase in tuple(self._exchanges):
            if phase in self._exchanges:  # an answer that is too large ends the epoch, and all exchanges with it
                self._answer_if_complete(phase)
        return True

    def close(self) -> None:
        """End the epoch in good order; whatever comes after is no failure."""
        self._closed = True
        self._tell(self._members, {"type": "closed"})
        for member in self._members.values():
            member.channel.finish()

    def _tell(self, ranks: Iterable[int], frame: Frame) -> None:
        data = encode(frame)
        for rank in tuple(ranks):
            if not self._members[rank].left:
                self._members[rank].channel.send(data)

    def _name(self, rank: int) -> str:
        member = self._members.get(rank)
        return f"{self._label(rank)} (pid {member.pid})" if member else self._label(rank)

    def _label(self, rank: int) -> str:
        return member_label(rank, self._trainers)

    def _told_by(self, rank: int, error: WeightwireError) -> WeightwireError:
        """`error` as the others see it: what one rank knows of a lost one stays that."""
        kind = type(error) if isinstance(error, PeerLost) else PeerFailed
        return kind.from_json({**error.to_json(), "rank": self._label(rank)})

    def _leave(self, rank: int) -> None:
        member = self._members[rank]
        member.left = True
        self._table.forget(rank)
        self._fail_if_stranded()
        member.channel.finish()

    def _fail_if_stranded(self) -> None:
        """Fail if anybody waits for a member that has left, or for an exchange that it waited for itself."""
        for rank, member in self._members.items():
            if not member.left or rank not in self._waited_for:
                continue
            posts = [(phase, posts.get(rank)) for phase, posts in self._exchanges.items()]
            stranded = [f"exchange {phase!r}" for phase, post in posts if post is None or post["waits"]]
            stranded += ["a key" for _ in self._table.waiters[:1]]
            if stranded:
                words = f"{self._name(rank)} left after {member.phase}, and others wait for {', '.join(stranded)}"
                self.fail(PeerLost(words), rank=rank)

    def _post(self, rank: int, frame: Frame) -> None:
        self._members[rank].phase = phase = frame["phase"]
        self._exchanges.setdefault(phase, {})[rank] = frame
        if not self._answer_if_complete(phase):
            self._fail_if_stranded()

    def _answer_if_complete(self, phase: str) -> bool:
        posts = self._exchanges[phase]
        complete = posts.keys() >= self._waited_for
        if complete:
            del self._exchanges[phase]
            self._answer(posts)
        return complete

    def _answer(self, posts: dict[int, Frame]) -> None:
        first = next(iter(posts.values()))
        outcome = {"type": "reply", "id": first["id"], **reduce(posts, self._label)}
        gatherers = [rank for rank in posts if posts[rank]["gather"]]
        if gatherers:
            payloads = {rank: posts[rank]["payload"] for rank in sorted(posts)}
            try:
                self._tell(gatherers, {**outcome, "payloads": payloads})
            except PayloadTooLarge as error:
                self.fail(PayloadTooLarge(f"{first['phase']}: all payloads together make {error.message}"))
                return
        self._tell([rank for rank in posts if rank not in gatherers], outcome)

    def _give_up(self, rank: int, frame: Frame) -> None:
        """A member waits no longer for an exchange: fail, unless it was answered in the meantime."""
        posts = self._exchanges.get(frame["phase"])
        if posts is None:
            return
        error = error_from_json(frame["error"])
        if not isinstance(error, DeadlineExceeded):
            self.fail(self._told_by(rank, error), rank=rank)
            return
        late = [other for other in sorted(self._waited_for) if other not in posts]
        words = f"{error.message}: {'; '.join(self._whereabouts(other) for other in late)}"
        self.fail(DeadlineExceeded(words, rank=self._label(rank)), rank=late[0])

    def _whereabouts(self, rank: int) -> str:
        member = self._members.get(rank)
        return f"{self._name(rank)} {f'is still in {member.phase}' if member else 'has not joined'}"

    def _serve(self, rank: int, request: Frame) -> None:
        for waiter, reply in self._table.serve(rank, request):
            self._tell([waiter.rank], {"type": "reply", "id": waiter.request["id"], **reply})
        self._fail_if_stranded()

    def _forget(self, rank: int, frame: Frame) -> None:
        self._table.forget(rank, frame["id"])
        silent = self._table.silent(frame["prefix"], frame["ranks"] or self._world)
        names = [self._whereabouts(other) for other in silent]
        self._tell([rank], {"type": "reply", "id": frame["id"], "silent": names})


class OwnMember:
    """The hub's channel to the member in its own process."""

    def __init__(self, receive: Callable[[Frame], None]) -> None:
        self._receive = receive

    def send(self, frame: bytes) -> None:
        """Hand a frame over."""
        self._receive(decode(frame))

    def finish(self) -> None:
        """There is no connection to close."""
