"""Who comes in at a doorway, who does not, and what they are told."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weightwire.deadline import Deadline
from weightwire.errors import HandshakeError, MessageError, PeerLost
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank
from weightwire_ipc.channel import Channel
from weightwire_ipc.doorway import Doorway, knock
from weightwire_ipc.host import identity

SECRET = bytes(range(16))
HEX = SECRET.hex()
NOBODY = 65534
State = dict[str, Any]


def come(
    state: State, address: str, member: int, *, secret: bytes = SECRET, place: dict[str, Any] | None = None
) -> int:
    """Knock in this rank and stay; returns the pid of who has opened."""
    channel = knock(
        address,
        peer="trainer rank 0",
        member=member,
        secret=SECRET,
        trainer=place or identity(),
        deadline=Deadline(10, what="knocking"),
    )
    state["channel"] = channel
    return channel.credentials.pid


def hang_up(state: State) -> None:
    state.pop("channel").close()


def visit(address: str, member: int = 0) -> None:
    """Knock, and leave once one was let in."""
    state: State = {}
    come(state, address, member)
    hang_up(state)


@contextmanager
def opened(directory: Path | None = None) -> Iterator[Doorway]:
    doorway = Doorway(None if directory is None else str(directory))
    try:
        yield doorway
    finally:
        doorway.close()


def admit(doorway: Doorway, members: int = 1) -> None:
    """Admit, check who came, and hang up."""
    labels = {member: f"worker rank {member}" for member in range(members)}
    admitted = doorway.admit(labels, secret=SECRET, deadline=Deadline(10, what="admitting"))
    assert sorted(admitted) == sorted(labels)
    for member, channel in admitted.items():
        assert channel.peer == labels[member]
        channel.close()


def stranger(address: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.settimeout(10)
    found.connect(f"\0{address[1:]}" if address.startswith("@") else address)
    return found


def hello(member: Any = 0, secret: Any = HEX) -> bytes:
    return json.dumps({"secret": secret, "member": member}).encode()


@pytest.mark.parametrize("in_directory", [False, True])
def test_members_come_in_any_order_from_their_own_processes(
    strict_ranks: BorrowRanks, socket_directory: Path, in_directory: bool
) -> None:
    come_in: list[Rank] = strict_ranks(2)
    with opened(socket_directory if in_directory else None) as doorway:
        assert doorway.address.startswith(str(socket_directory) if in_directory else "@weightwire-")
        if in_directory:
            assert stat.S_IMODE(os.stat(doorway.address).st_mode) == 0o600
        coming = [rank.start(come, doorway.address, member) for member, rank in enumerate(reversed(come_in))]
        admit(doorway, 2)
        assert [call.result() for call in coming] == [os.getpid()] * 2
    assert not list(socket_directory.iterdir())
    with pytest.raises(HandshakeError, match="trainer rank 0 cannot be reached .*has the trainer ended"):
        come({}, "@weightwire-that-is-not-there", 0)
    for rank in come_in:
        rank.call(hang_up)


GARBAGE: dict[str, bytes] = {
    "no json": b"\xff\xfe",
    "a list": b"[1, 2]",
    "nested without end": b"[" * 60000,
    "too long": b'{"secret": "' + b"a" * 100_000 + b'"}',
    "nothing": b"{}",
    "no secret": b'{"member": 0}',
    "a wrong secret": hello(secret="00" * 16),
    "a secret of another type": hello(secret=[1]),
    "a secret that is no text": b'{"secret": "\\ud800", "member": 0}',
    "a secret in other letters": hello(secret=SECRET.hex().upper() + " "),
    "a member that is not waited for": hello(7),
    "a negative member": hello(-1),
    "a member of another type": hello("0"),
    "a member that is a list": hello([0]),
    "no member": hello(None),
    "a member that is half a one": hello(0.0),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_stranger_is_hung_up_on_and_disturbs_nobody(kind: str) -> None:
    with opened() as doorway:
        found = stranger(doorway.address)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        found.send(GARBAGE[kind])
        member = threading.Thread(target=visit, args=(doorway.address,))
        member.start()
        admit(doorway)
        assert found.recv(100) == b""
        member.join()
        found.close()


def test_a_member_comes_once_and_has_to_read_the_probe() -> None:
    with opened() as doorway:
        wrong, second = (stranger(doorway.address) for _ in range(2))
        heard: dict[str, bytes] = {}

        def visits() -> None:
            wrong.send(hello())
            wrong.recv(1000)
            wrong.send(b'{"probe": "what is not there"}')
            heard["wrong"] = wrong.recv(1000)
            visit(doorway.address, 0)
            second.send(hello())
            heard["second"] = second.recv(1000)
            visit(doorway.address, 1)

        visiting = threading.Thread(target=visits)
        visiting.start()
        admit(doorway, 2)
        visiting.join()
        assert heard == {"wrong": b"", "second": b""}
        for one in (wrong, second):
            one.close()


def test_silent_strangers_do_not_use_up_descriptors() -> None:
    with opened() as doorway:
        silent = [stranger(doorway.address) for _ in range(40)]
        before = len(os.listdir("/proc/self/fd"))
        most = 0

        def visits() -> None:
            nonlocal most
            visit(doorway.address, 0)
            # The oldest of them have been hung up on.
            assert silent[0].recv(10) == b""
            most = len(os.listdir("/proc/self/fd"))
            visit(doorway.address, 1)

        visiting = threading.Thread(target=visits)
        visiting.start()
        admit(doorway, 2)
        visiting.join()
        assert most <= before + 32 + 8
        for one in silent:
            one.close()


def test_many_members_that_come_at_once_are_not_taken_for_strangers() -> None:
    with opened() as doorway:
        count = 48
        knocked = threading.Barrier(count + 1)
        failed: list[BaseException] = []

        def speak(member: int) -> None:
            # As `knock` does, but all have spoken before the first is answered.
            channel = Channel(stranger(doorway.address), "trainer rank 0")
            deadline = Deadline(10, what="knocking")
            channel.send({"secret": SECRET.hex(), "member": member}, deadline=deadline)
            knocked.wait(10)
            try:
                message = channel.receive(deadline)
                read = os.pread(message.descriptors[0], 32, 0).decode()
                message.close()
                channel.send({"probe": read}, deadline=deadline)
                channel.receive(deadline).close()
            except PeerLost as error:
                failed.append(error)
            channel.close()

        visitors = [threading.Thread(target=speak, args=(member,)) for member in range(count)]
        for visitor in visitors:
            visitor.start()
        knocked.wait(10)
        try:
            admit(doorway, count)
        finally:
            for visitor in visitors:
                visitor.join()
        assert not failed


def test_who_does_not_come_is_named() -> None:
    with opened() as doorway, pytest.raises(TimeoutError, match="worker rank 0 to connect"):
        doorway.admit({3: "worker rank 0"}, secret=SECRET, deadline=Deadline(0.1))


def test_a_trainer_that_hangs_up_is_named() -> None:
    with opened() as doorway:
        closing = threading.Thread(target=lambda: hang_up_on_one(doorway))
        closing.start()
        with pytest.raises(PeerLost, match="trainer rank 0 closed"):
            come({}, doorway.address, 0)
        closing.join()


def hang_up_on_one(doorway: Doorway) -> None:
    with pytest.raises(TimeoutError):
        doorway.admit({9: "worker rank 9"}, secret=SECRET, deadline=Deadline(0.5))


def test_another_boot_is_another_host() -> None:
    with pytest.raises(HandshakeError, match="different hosts.*'nccl'"):
        come({}, "@nobody", 0, place={**identity(), "boot": "another"})


@pytest.mark.parametrize("directory", ["/does/not/exist", "/dev/null", "/tmp/" + 110 * "a", "/proc/self"])
def test_a_directory_that_takes_no_socket(directory: str) -> None:
    with pytest.raises(MessageError, match="socket_directory .* takes no socket"):
        Doorway(directory)
