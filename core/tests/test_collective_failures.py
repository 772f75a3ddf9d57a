from __future__ import annotations

import time
import weakref
from pathlib import Path

import pytest
import torch

from core.tests.collective_ranks import (
    MIB,
    State,
    cancel,
    close_all,
    connect,
    connect_all,
    connected,
    failed,
    reaped,
    receive,
    receive_and_retire,
    receive_zeros,
    resources,
    retire,
    send,
    send_zeros,
    settle_at,
)
from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, PeerFailed, PeerLost, PeerStalled, TransferAborted
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool import FaultError

FIRST_PIECE = "communicator.first_piece"
BIG = 128 * MIB


@pytest.mark.parametrize("blocked", ["sender", "receiver"])
def test_cancel_ends_a_wait_at_once(ranks: BorrowRanks, tmp_path: Path, blocked: str) -> None:
    first, _ = connected(ranks, 2, tmp_path, piece_bytes=MIB)
    sends = blocked == "sender"
    call = first.start(send_zeros, 20 * MIB, [1]) if sends else first.start(receive_zeros, 20 * MIB, 1)
    first.call(wait_until_started)
    cancelled = first.call(cancel)
    with pytest.raises(TransferAborted, match="somebody called abort"):
        call.result()
    assert call.ended is not None
    assert call.ended - cancelled < 0.5
    assert first.call(failed)


def test_a_cancelled_deadline_lets_nothing_begin(ranks: BorrowRanks, tmp_path: Path) -> None:
    first, _ = connected(ranks, 2, tmp_path)
    with pytest.raises(TransferAborted):
        first.call(send_when_cancelled)
    assert first.call(failed)


def send_when_cancelled(state: State) -> None:
    deadline = Deadline(10)
    deadline.cancel(TransferAborted("stop"))
    state["communicator"].send([torch.zeros(8, dtype=torch.uint8)], [1], deadline=deadline)


def wait_until_started(state: State) -> None:
    until = time.monotonic() + 10
    while "deadline" not in state and time.monotonic() < until:
        time.sleep(0.001)


def test_a_killed_receiver_is_named_and_the_other_one_finishes(ranks: BorrowRanks, tmp_path: Path) -> None:
    sender, one, other = connected(ranks, 3, tmp_path, senders=[0], piece_bytes=4 * MIB)
    one.at(FIRST_PIECE, "kill")
    sent = sender.start(send_zeros, BIG, [1, 2])
    received = other.start(receive_zeros, BIG, 0)
    one.start(receive_zeros, BIG, 0)
    one.reached(FIRST_PIECE)
    killed = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 was lost during the transfer"):
        sent.result()
    assert sent.ended is not None
    assert sent.ended - killed < 2.0
    assert received.result()


def test_a_killed_sender_is_named_by_every_receiver(ranks: BorrowRanks, tmp_path: Path) -> None:
    sender, *others = connected(ranks, 3, tmp_path, senders=[0], piece_bytes=4 * MIB)
    sender.at(FIRST_PIECE, "kill")
    received = [rank.start(receive_zeros, BIG, 0) for rank in others]
    sender.start(send_zeros, BIG, [1, 2])
    sender.reached(FIRST_PIECE)
    killed = time.monotonic()
    for call in received:
        with pytest.raises(PeerLost, match="rank 0 was lost during the transfer"):
            call.result()
        assert call.ended is not None
        assert call.ended - killed < 2.0


@pytest.mark.parametrize("collective", [False, True])
def test_a_receiver_killed_before_it_receives(ranks: BorrowRanks, tmp_path: Path, collective: bool) -> None:
    sender, one, other = connected(ranks, 3, tmp_path, senders=[0], collective=collective)
    received = other.start(receive_zeros, 20 * MIB, 0)
    sending = sender.start(send_zeros, 20 * MIB, [1, 2])
    one.kill()
    with pytest.raises(PeerLost, match="rank 1"):
        sending.result()
    if not collective:
        assert received.result()


@pytest.mark.thorough
def test_a_stopped_receiver_is_named_and_a_new_group_works_at_once(ranks: BorrowRanks, tmp_path: Path) -> None:
    lent = sender, stopped, other = ranks(3)
    before = [rank.call(resources) for rank in lent]
    connect_all(lent, tmp_path / "old", senders=[0], piece_bytes=4 * MIB, stall_limit=0.5)
    stopped.at(FIRST_PIECE, "stop")
    sent = sender.start(send_zeros, BIG, [1, 2])
    received = other.start(receive_zeros, BIG, 0)
    stopped.start(receive_zeros, BIG, 0)
    stopped.reached(FIRST_PIECE)
    stop = time.monotonic()
    with pytest.raises(PeerStalled, match="rank 1 is there and has not moved a byte for"):
        sent.result()
    assert sent.ended is not None
    assert sent.ended - stop < 0.5 + 1.0
    assert received.result()
    assert sender.call(retire) == 1
    other.call(retire)
    connect_all([sender, other], tmp_path / "new")
    again = sender.start(send, [1000], [1])
    assert other.call(receive, [1000], 0)
    again.result()
    close_all([sender, other])
    stopped.kill()
    for rank, resources_before in ((sender, before[0]), (other, before[2])):
        rank.call(reaped)
        assert rank.call(settle_at, resources_before) == resources_before


def test_a_retired_buffer_lives_until_nothing_can_write_to_it(ranks: BorrowRanks, tmp_path: Path) -> None:
    receiver, sender = connected(ranks, 2, tmp_path, senders=[1], piece_bytes=4 * MIB, stall_limit=0.5)
    sender.at(FIRST_PIECE, "stop")
    ended = receiver.start(receive_and_retire, 128 * MIB, 1)
    sender.start(send_zeros, 128 * MIB, [0])
    sender.reached(FIRST_PIECE)
    assert ended.result().startswith("PeerStalled: [rank 0] rank 1")
    assert receiver.call(buffer_lives)
    sender.kill()
    receiver.call(reaped)
    assert not receiver.call(buffer_lives)


def buffer_lives(state: State) -> bool:
    weak: weakref.ref[torch.UntypedStorage] = state["weak"]
    return weak() is not None


def test_giving_up_is_heard_by_the_peers(ranks: BorrowRanks, tmp_path: Path) -> None:
    first, second = connected(ranks, 2, tmp_path)
    waiting = second.start(receive_zeros, 100, 0)
    first.call(retire)
    with pytest.raises(PeerFailed, match="rank 0 gave up the transfer"):
        waiting.result()


def test_a_peer_that_has_closed_is_named(ranks: BorrowRanks, tmp_path: Path) -> None:
    first, second = connected(ranks, 2, tmp_path)
    first.call(close_early)
    with pytest.raises(PeerLost, match="rank 0"):
        second.call(receive_zeros, 100, 0)


def close_early(state: State) -> None:
    state.pop("communicator").close(Deadline(5))


def test_a_fault_while_connecting_retires(ranks: BorrowRanks, tmp_path: Path) -> None:
    first, second = ranks(2)
    first.at("communicator.connected", "raise")
    calls = [rank.start(connect, number, 2, str(tmp_path / "store")) for number, rank in enumerate((first, second))]
    calls[1].result()
    with pytest.raises(FaultError):
        calls[0].result()
    with pytest.raises(PeerFailed, match="rank 0"):
        second.call(receive_zeros, 1, 0)


def test_ranks_that_do_not_come_are_named(ranks: BorrowRanks, tmp_path: Path) -> None:
    first, second = ranks(2)
    calls = [rank.start(connect, number, 4, str(tmp_path / "store"), 1.0) for number, rank in ((1, first), (3, second))]
    with pytest.raises(DeadlineExceeded, match="rank 0, rank 2 did not connect within 1 s"):
        calls[0].result()
    with pytest.raises(DeadlineExceeded, match="rank 0, rank 2 did not connect within 1 s"):
        calls[1].result()
