from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest

from core.tests.epochs import LIMIT, SECRET, join, open_epoch
from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, PeerFailed, PeerLost, PeerStalled, WeightwireError
from weightwire.rendezvous import Rendezvous
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool import PendingCall, Rank
from weightwire.testing.pool_rank import at_tidy

PROMPT = 2.0
"""Seconds in which a death has to be known to all."""

State = dict[str, Any]


def host(state: State, workers: int, peer_timeout: float = 10.0) -> int:
    member = state["member"] = open_epoch(workers=workers, peer_timeout=peer_timeout)
    at_tidy(member.close)
    return member.port


def enter(state: State, port: int, rank: int) -> None:
    member = state["member"] = join(port, rank)
    at_tidy(member.close)


def exchange(state: State, phase: str, seconds: float = LIMIT) -> bool:
    member: Rendezvous = state["member"]
    return member.exchange(phase, deadline=Deadline(seconds)).unanimous


def watch(state: State) -> None:
    """Be busy with bytes, as an engine is."""
    member: Rendezvous = state["member"]
    deadline = Deadline(LIMIT)
    with member.watch(deadline):
        deadline.sleep(LIMIT)


def failure(state: State) -> tuple[str, int | None, bool]:
    member: Rendezvous = state["member"]
    return str(member.failure), member.failed_rank, member.closed


def world(ranks: BorrowRanks, count: int, peer_timeout: float = 10.0) -> list[Rank]:
    """Rank 0 hosts, everybody has joined and met once."""
    members = ranks(count)
    port = members[0].call(host, count - 1, peer_timeout)
    for number, member in enumerate(members[1:], 1):
        member.call(enter, port, number)
    met = [member.start(exchange, "hello") for member in members]
    assert all(pending.result(LIMIT) for pending in met)
    return members


def phase(state: State) -> str:
    return str(state["member"]._phase)


def waits(member: Rank, name: str) -> PendingCall[bool]:
    """Have a member exchange; returns when it does."""
    pending = member.start(exchange, name)
    until = time.monotonic() + LIMIT
    while member.call(phase) != name:
        assert time.monotonic() < until
        time.sleep(0.005)
    return pending


def assert_told(waiting: list[PendingCall[Any]], kind: type[WeightwireError], match: str, within: float) -> None:
    began = time.monotonic()
    for pending in waiting:
        with pytest.raises(kind, match=match):
            pending.result(LIMIT)
    assert time.monotonic() - began < within


def test_a_killed_worker_is_named_to_all_that_wait_and_to_all_that_are_busy(strict_ranks: BorrowRanks) -> None:
    members = world(strict_ranks, 4)
    busy = [members[number].start(watch) for number in (0, 1, 2)]
    waiting = [waits(members[number], "vote-1") for number in (0, 1, 2)]
    dead = members[3].pid
    members[3].kill()
    match = rf"worker rank 2 \(pid {dead}\) was lost during hello: its connection "
    assert_told([*waiting, *busy], PeerLost, match, PROMPT)
    for member in members[:3]:
        words, rank, closed = member.call(failure)
        assert (rank, closed) == (3, False)
        assert str(dead) in words


def test_a_killed_host_is_named_by_every_member(strict_ranks: BorrowRanks) -> None:
    members = world(strict_ranks, 3)
    waiting = [waits(members[number], "vote-1") for number in (1, 2)]
    dead = members[0].pid
    members[0].kill()
    assert_told(waiting, PeerLost, rf"trainer rank 0 \(pid {dead}\) was lost during vote-1: its connection ", PROMPT)


def test_a_stopped_worker_is_named_and_learns_it_when_it_goes_on(strict_ranks: BorrowRanks) -> None:
    members = world(strict_ranks, 3, peer_timeout=1.0)
    waiting = [waits(members[number], "vote-1") for number in (0, 1)]
    members[2].stop()
    match = rf"worker rank 1 \(pid {members[2].pid}\) has said nothing for 1 s, during hello: it is stopped"
    assert_told(waiting, PeerStalled, match, 1.0 + PROMPT)
    members[2].resume()
    with pytest.raises(PeerStalled, match=match):
        members[2].call(exchange, "vote-1", timeout=LIMIT)


def test_a_stopped_host_is_named_and_blames_nobody_when_it_goes_on(strict_ranks: BorrowRanks) -> None:
    members = world(strict_ranks, 3, peer_timeout=1.0)
    waiting = [waits(members[number], "vote-1") for number in (1, 2)]
    members[0].stop()
    match = rf"trainer rank 0 \(pid {members[0].pid}\) has said nothing for 1 s, during vote-1: it is stopped"
    assert_told(waiting, PeerStalled, match, 1.0 + PROMPT)
    members[0].resume()
    assert members[0].call(failure)[0] == "None"


def test_a_deadline_passes_even_if_the_host_is_stopped(strict_ranks: BorrowRanks) -> None:
    members = world(strict_ranks, 2)
    members[0].stop()
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="'vote-1' did not end within 0.2 s, and trainer rank 0 does not answer"):
        members[1].call(exchange, "vote-1", 0.2, timeout=LIMIT)
    assert time.monotonic() - began < 0.2 + PROMPT
    members[0].resume()
    with pytest.raises(WeightwireError, match="did not end within 0.2 s"):
        members[0].call(exchange, "vote-1", timeout=LIMIT)


def test_after_a_death_the_others_meet_in_a_new_epoch(strict_ranks: BorrowRanks) -> None:
    members = world(strict_ranks, 3)
    members[2].kill()
    with pytest.raises(PeerLost):
        members[0].call(exchange, "vote-1", timeout=LIMIT)
    port = members[0].call(host, 1)
    members[1].call(enter, port, 1)
    met = [members[number].start(exchange, "hello") for number in (0, 1)]
    assert all(pending.result(LIMIT) for pending in met)


def test_a_rank_that_never_comes_is_named(strict_ranks: BorrowRanks) -> None:
    (first,) = strict_ranks(1)
    member = open_epoch(workers=2)
    first.call(enter, member.port, 1)
    waiting = waits(first, "hello")
    with pytest.raises(DeadlineExceeded, match="worker rank 1 has not joined"):
        member.exchange("hello", deadline=Deadline(0.5))
    assert_told([waiting], DeadlineExceeded, "worker rank 1 has not joined", PROMPT)
    member.close()


def script(body: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body), *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


JOIN = """
    import os, sys, time
    from weightwire.deadline import Deadline
    from weightwire.errors import TransferError
    from weightwire.rendezvous import Rendezvous

    secret, port = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
    member = Rendezvous.join(address="127.0.0.1", port=port, rank=1, secret=secret, epoch=1, deadline=Deadline(20))
"""


@pytest.fixture
def joined() -> Any:
    """`joined(body)`: this process hosts, and another one has joined and runs `body`."""
    running: list[tuple[Rendezvous, subprocess.Popen[str]]] = []

    def run(body: str) -> tuple[Rendezvous, subprocess.Popen[str]]:
        member = open_epoch(workers=1)
        process = script(JOIN + textwrap.indent(textwrap.dedent(body), "    "), SECRET.hex(), member.port)
        running.append((member, process))
        return member, process

    yield run
    for member, process in running:
        process.kill()
        process.communicate()
        member.close()


Joined = Callable[[str], tuple[Rendezvous, "subprocess.Popen[str]"]]


def test_a_forked_child_does_not_hide_the_death_of_its_parent(joined: Joined) -> None:
    member, process = joined(
        """
        child = os.fork()
        if not child:
            member.close()
            time.sleep(60)
        print(child, flush=True)
        member.exchange("hello", deadline=Deadline(20))
        time.sleep(60)
        """
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert member.exchange("hello", deadline=Deadline(LIMIT)).unanimous
    began = time.monotonic()
    process.kill()
    with pytest.raises(PeerLost, match=rf"pid {process.pid}\) was lost during hello"):
        member.exchange("vote-1", deadline=Deadline(LIMIT))
    assert time.monotonic() - began < PROMPT
    os.kill(child, signal.SIGKILL)


def test_a_process_that_ends_without_close_is_lost_and_is_not_kept_alive(joined: Joined) -> None:
    member, process = joined("member.note_phase('transfer-1')")
    with pytest.raises(PeerLost, match=rf"worker rank 0 \(pid {process.pid}\) was lost during (join|transfer-1)"):
        member.exchange("hello", deadline=Deadline(LIMIT))
    assert process.wait(LIMIT) == 0


def test_the_words_of_a_process_that_fails_and_ends_arrive(joined: Joined) -> None:
    member, process = joined("member.fail(TransferError('out of memory')); os._exit(3)")
    with pytest.raises(PeerFailed, match="worker rank 0. out of memory"):
        member.exchange("hello", deadline=Deadline(LIMIT))
    assert process.wait(LIMIT) == 3


def test_importing_and_joining_need_no_torch(joined: Joined) -> None:
    member, process = joined(
        """
        print("torch" in sys.modules)
        member.exchange("hello", deadline=Deadline(20))
        member.close()
        """
    )
    assert member.exchange("hello", deadline=Deadline(LIMIT)).unanimous
    assert process.communicate(timeout=LIMIT)[0] == "False\n"
    assert member.failure is None
    with pytest.raises(PeerLost, match="left after hello"):
        member.exchange("vote-1", deadline=Deadline(LIMIT))


def test_a_port_held_by_the_caller_is_never_shared() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(WeightwireError, match="cannot listen"):
        open_epoch(workers=1, port=listener.getsockname()[1])
