from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from core.tests.epochs import LIMIT, SECRET, Epoch, RawMember, error_of, join, open_epoch
from weightwire.deadline import Deadline
from weightwire.errors import (
    DeadlineExceeded,
    HandshakeError,
    MessageError,
    PeerFailed,
    PeerLost,
    TransferAborted,
    TransferError,
    Unauthorized,
)
from weightwire.rendezvous import Rendezvous

JUNK = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "oversize": struct.pack(">I", 4097),
    "gigantic": b"\xff" * 64,
    "nested": struct.pack(">I", 4000) + b"[" * 4000,
    "zero": struct.pack(">I", 0),
    "list": struct.pack(">I", 2) + b"[]",
    "not text": struct.pack(">I", 4) + b"\xff\xfe\xfd\xfc",
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_junk_is_dropped_at_once(junk: bytes) -> None:
    host = open_epoch(workers=1)
    with RawMember(host.port) as stranger:
        stranger.socket.sendall(junk)
        assert stranger.is_dropped()
    assert host.failure is None
    host.close()


def test_silent_strangers_are_dropped_and_stall_nobody() -> None:
    host = open_epoch(workers=1)
    strangers = [RawMember(host.port) for _ in range(300)]
    strangers[-1].socket.sendall(b"\0\0")
    member = join(host.port, 1, seconds=2.0)
    waiting = threading.Thread(target=host.exchange, args=("hello",), kwargs={"deadline": Deadline(LIMIT)})
    waiting.start()
    assert member.exchange("hello", deadline=Deadline(LIMIT)).unanimous
    waiting.join(LIMIT)
    for stranger in strangers:
        stranger.socket.settimeout(2.0 + LIMIT)
        assert stranger.is_dropped()
        stranger.socket.close()
    assert host.failure is None
    host.close()
    member.close()


@pytest.mark.parametrize("offered", ["00" * 16, "", "é", "\ud800", None, 5, ["x"], SECRET.hex().upper()])
def test_a_wrong_secret_is_told_nothing_else(offered: Any) -> None:
    host = open_epoch(workers=1)
    with RawMember(host.port) as stranger:
        answer = stranger.hello(7, hello=offered, epoch=9)
        assert answer["type"] == "refused"
        assert answer["error"]["type"] == "Unauthorized"
        assert answer["error"]["message"] == "the secret is not that of this trainer"
        assert stranger.is_dropped()
    assert host.absent == (1,)
    host.close()


def test_a_joiner_with_a_wrong_secret_is_unauthorized() -> None:
    host = open_epoch(workers=1)
    with pytest.raises(Unauthorized):
        join(host.port, 1, secret=bytes(16))
    host.close()


def test_joiners_that_do_not_fit_are_told_why() -> None:
    with Epoch(trainers=1, workers=1) as epoch:
        port = epoch.members[0].port
        with pytest.raises(
            HandshakeError, match="member rank 2 is outside this world of 1 trainer ranks and 1 workers"
        ):
            join(port, 2)
        with pytest.raises(HandshakeError, match=r"worker rank 0 \(pid \d+\) is already here"):
            join(port, 1)
        with pytest.raises(HandshakeError, match="trainer rank 0 .* is already here"):
            join(port, 0)
        for wrong in (0, 2):
            with pytest.raises(HandshakeError, match=f"wants epoch {wrong}, and this is epoch 1"):
                join(port, 1, epoch=wrong)
        for changes in ({"pid": "x"}, {"rank": True}, {"rank": None}, {"epoch": 1.5}):
            with RawMember(port) as odd:
                answer = odd.hello(**{"rank": 1, **changes})  # type: ignore[arg-type]
                assert "have to be integers" in answer["error"]["message"]
        with RawMember(port) as old:
            answer = old.hello(1, protocol=0)
            assert answer["error"]["message"] == "the member speaks protocol 0, the trainer 1"
        assert all(outcome.unanimous for outcome in epoch.all_exchange("hello"))


def test_whoever_left_does_not_come_back_into_the_same_epoch() -> None:
    with Epoch(workers=1) as epoch:
        epoch.members[1].close()
        with pytest.raises(HandshakeError, match="has left this epoch; join the next"):
            join(epoch.members[0].port, 1)


def test_a_dead_epoch_tells_latecomers_why_it_is_dead() -> None:
    host = open_epoch(workers=2)
    host.fail(TransferError("no weights", transport="nccl"))
    with pytest.raises(PeerFailed, match=r"\[nccl, trainer rank 0\] no weights"):
        join(host.port, 1)
    host.close()


def test_a_member_of_the_next_epoch_waits_for_the_dead_one_to_go() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        first = open_epoch(workers=1, epoch=1, listen_socket=listener.dup())
        first.fail(TransferError("no"))
        joined: list[Rendezvous] = []
        early = threading.Thread(target=lambda: joined.append(join(port, 1, epoch=2)))
        early.start()
        with RawMember(port) as member:  # one that is refused in the same way, so that time passes
            assert member.hello(1, epoch=2)["again"] is True
        first.close()
        second = open_epoch(workers=1, epoch=2, listen_socket=listener.dup())
        early.join(LIMIT)
        assert second.absent == ()
        second.close()
        joined[0].close()


def test_many_epochs_leave_nothing_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        counts = []
        for number in range(21):
            with Epoch(workers=3, epoch=1, listen_socket=listener.dup()) as epoch:
                assert all(outcome.unanimous for outcome in epoch.all_exchange("hello"))
                if number % 2:
                    epoch.members[2].fail(TransferError("no"))
            counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
        assert len(set(counts)) == 1


def test_closing_is_quick_even_if_nobody_answers() -> None:
    host = open_epoch(workers=1)
    with RawMember(host.port) as member:
        member.hello(1)
        began = time.monotonic()
        host.close()
        assert time.monotonic() - began < 2.0
    assert host.failure is None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(
            DeadlineExceeded, match=r"joining trainer rank 0 at 127\.0\.0\.1:\d+ did not end within 0.2 s"
        ):
            join(silent.getsockname()[1], 1, seconds=0.2)
        assert time.monotonic() - began < 3.0


def test_joining_can_be_cancelled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        deadline = Deadline(LIMIT)
        threading.Timer(0.1, deadline.cancel, [TransferAborted("abort")]).start()
        with pytest.raises(TransferAborted):
            Rendezvous.join(
                address="127.0.0.1",
                port=silent.getsockname()[1],
                rank=1,
                secret=SECRET,
                epoch=1,
                deadline=deadline,
            )


def test_where_nobody_listens_nobody_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(PeerLost, match=f"cannot connect to 127.0.0.1:{port} .*check master_address"):
        join(port, 1)
    with pytest.raises(MessageError, match="no such host.invalid:1 is no address"):
        Rendezvous.join(
            address="no such host.invalid", port=1, rank=1, secret=SECRET, epoch=1, deadline=Deadline(LIMIT)
        )


def test_somebody_else_at_the_address_is_not_tried_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up() -> None:
            for _ in range(3):
                other.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(PeerLost, match="did not let this member in: its connection"):
            join(other.getsockname()[1], 1)


def test_the_socket_of_the_caller_is_used_and_bound_to_its_address_alone() -> None:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        host = open_epoch(workers=0, listen_socket=listener.dup())
        assert (host.local_address, host.port) == listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", host.port), timeout=LIMIT)
        host.close()


def test_ipv6_works_where_the_machine_has_it() -> None:
    try:
        host = open_epoch(workers=1, address="::1")
    except MessageError as error:
        pytest.skip(str(error))
    member = Rendezvous.join(address="::1", port=host.port, rank=1, secret=SECRET, epoch=1, deadline=Deadline(LIMIT))
    assert member.local_address == "::1"
    host.close()
    member.close()


def test_without_free_descriptors_the_epoch_goes_on() -> None:
    with Epoch(workers=1) as epoch, ExitStack() as held:
        strangers = [held.enter_context(socket.socket()) for _ in range(5)]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), limits[1]))
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with suppress(OSError):
            while True:
                held.callback(os.close, os.dup(0))
        for stranger in strangers:
            stranger.connect(("127.0.0.1", epoch.members[0].port))
        for number in range(5):
            assert all(outcome.unanimous for outcome in epoch.all_exchange(f"without-{number}"))
        held.close()
        assert all(outcome.unanimous for outcome in epoch.all_exchange("with"))
        waiting = epoch.exchange(0, "vote")
        epoch.members[1].fail(TransferError("done"))
        assert isinstance(error_of(waiting), PeerFailed)
