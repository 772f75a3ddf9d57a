from __future__ import annotations

import threading
import time

import pytest

from core.tests.epochs import LIMIT, SECRET, Epoch, RawMember, error_of, join, open_epoch
from weightwire import frames, loop
from weightwire.deadline import Deadline
from weightwire.errors import (
    Busy,
    DeadlineExceeded,
    HandshakeError,
    MessageError,
    OrderError,
    PayloadTooLarge,
    PeerFailed,
    PeerLost,
    PeerStalled,
    SourceMismatch,
    TransferAborted,
    TransferError,
    Unsupported,
)
from weightwire.rendezvous import Rendezvous

PROMPT = 2.0
"""Seconds in which a failure has to be known to all."""


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 1 MiB in place of 64, so that tests of it take no time."""
    monkeypatch.setattr(frames, "MAX_FRAME", 1 << 20)
    monkeypatch.setattr(loop, "MAX_FRAME", 1 << 20)


def test_members_know_the_world_and_their_names() -> None:
    with Epoch(trainers=2, workers=2) as epoch:
        assert [member.label() for member in epoch.members] == [
            "trainer rank 0", "trainer rank 1", "worker rank 0", "worker rank 1",
        ]  # fmt: skip
        assert {(member.trainers, member.workers) for member in epoch.members} == {(2, 2)}
        assert [member.is_host for member in epoch.members] == [True, False, False, False]
        assert epoch.members[3].label(0) == "trainer rank 0"
        assert {member.local_address for member in epoch.members} == {"127.0.0.1"}


def test_the_host_knows_who_has_not_joined() -> None:
    host = open_epoch(trainers=2, workers=2)
    assert list(host.absent) == [1, 2, 3]
    member = join(host.port, 2)
    assert list(host.absent) == [1, 3]
    host.close()
    member.close()


def test_a_trainer_alone_needs_nobody() -> None:
    host = open_epoch(workers=0)
    outcome = host.exchange("hello", deadline=Deadline(LIMIT), payload=(1, 2), gather=True)
    assert outcome.unanimous
    assert outcome.payloads == {0: [1, 2]}
    host.close()


def test_an_exchange_tells_all_the_same_and_payloads_to_those_that_gather() -> None:
    with Epoch() as epoch:
        outcomes = epoch.all_exchange(
            "hello", {rank: {"agree": {"wire": 1}, "payload": {"r": rank}, "gather": rank == 1} for rank in range(3)}
        )
        assert all(outcome.unanimous and outcome.phase == "hello" for outcome in outcomes)
        assert [outcome.payloads for outcome in outcomes] == [{}, {0: {"r": 0}, 1: {"r": 1}, 2: {"r": 2}}, {}]
        for outcome in outcomes:
            outcome.raise_failed()


def test_a_rank_that_failed_takes_part_and_is_quoted() -> None:
    own = SourceMismatch("index 0: expected a, got b", transport="nccl", parameter="a")
    with Epoch() as epoch:
        first, second, third = epoch.all_exchange("vote-1", {1: {"error": own}})
        with pytest.raises(SourceMismatch) as raised:
            second.raise_failed()
        assert raised.value is own
        for outcome in (first, third):
            assert not outcome.unanimous
            (failed,) = outcome.errors
            assert (failed.rank, failed.label) == (1, "worker rank 0")
            with pytest.raises(SourceMismatch) as raised:
                outcome.raise_failed()
            assert str(raised.value) == "[nccl, worker rank 0] index 0: expected a, got b"
            assert raised.value.parameter == "a"
        # A round that failed leaves the epoch as it was.
        assert all(outcome.unanimous for outcome in epoch.all_exchange("vote-2"))


@pytest.mark.parametrize("error", [TransferError("disk"), Unsupported("disk"), TransferAborted("disk")])
def test_what_is_nobodys_input_reaches_others_as_peer_failed(error: TransferError) -> None:
    with Epoch(workers=1) as epoch:
        outcome = epoch.all_exchange("vote-1", {1: {"error": error}})[0]
        with pytest.raises(PeerFailed, match="worker rank 0.*disk") as raised:
            outcome.raise_failed()
        assert type(raised.value) is PeerFailed


def test_the_first_error_to_arrive_comes_first() -> None:
    with Epoch() as epoch:
        late = epoch.exchange(2, "vote-1", error=TransferError("first"))
        while "vote-1" not in epoch.members[2]._mailbox._replies:
            time.sleep(0)
        epoch.all_exchange("between")  # what a member said before this is with the hub after it
        waiting = [epoch.exchange(rank, "vote-1", error=TransferError("second")) for rank in (0, 1)]
        for future in (*waiting, late):
            assert [error.error.message for error in future.result(LIMIT).errors] == ["first", "second", "second"]


def test_disagreements_name_the_odd_ranks_and_values() -> None:
    with Epoch(workers=3) as epoch:
        contents = {rank: {"agree": {"wire": 1, "metadata": "aa"}} for rank in range(4)}
        contents[2]["agree"] = {"wire": 1, "metadata": "bb", "only here": 5}
        for outcome in epoch.all_exchange("hello", contents):
            assert not outcome.unanimous
            (sentence,) = outcome.disagreements
            assert sentence.startswith('metadata: worker rank 1 has "bb", but trainer rank 0, worker rank 0')
            with pytest.raises(HandshakeError, match="hello: metadata: worker rank 1"):
                outcome.raise_failed()


def test_in_a_tie_trainer_rank_0_is_right() -> None:
    with Epoch(workers=1) as epoch:
        (sentence,) = epoch.all_exchange("hello", {0: {"agree": {"wire": 2}}, 1: {"agree": {"wire": 1}}})[
            1
        ].disagreements
        assert sentence == "wire: worker rank 0 has 1, but trainer rank 0 has 2"


def test_a_post_takes_part_without_waiting_even_if_its_member_leaves() -> None:
    with Epoch() as epoch:
        host = epoch.exchange(0, "done-1", gather=True)
        epoch.members[1].post("done-1", payload="saved")
        epoch.members[1].close()
        outcome = epoch.exchange(2, "done-1")
        assert host.result(LIMIT).payloads == {0: None, 1: "saved", 2: None}
        assert outcome.result(LIMIT).unanimous
        assert [member.failure for member in epoch.members] == [None] * 3


def test_a_deadline_names_who_did_not_come_to_everybody() -> None:
    with Epoch(trainers=1, workers=2) as epoch:
        epoch.members[2].note_phase("transfer-1")
        patient = epoch.exchange(1, "vote-1")
        began = time.monotonic()
        hurried = epoch.exchange(0, "vote-1", seconds=0.3)
        for future in (hurried, patient):
            error = error_of(future)
            assert isinstance(error, DeadlineExceeded)
            assert "worker rank 1 (pid " in error.message
            assert "is still in transfer-1" in error.message
            assert error.rank == "trainer rank 0"
        assert time.monotonic() - began < 0.3 + PROMPT
        # Nobody may act on a vote that another one has stopped waiting for.
        assert isinstance(error_of(epoch.exchange(2, "vote-1")), DeadlineExceeded)
        assert {member.failed_rank for member in epoch.members} == {2}


def test_a_deadline_names_who_never_joined() -> None:
    host = open_epoch(workers=2)
    member = join(host.port, 2)
    with pytest.raises(DeadlineExceeded, match="worker rank 0 has not joined; worker rank 1 .* is still in join"):
        host.exchange("hello", deadline=Deadline(0.2))
    host.close()
    member.close()


def test_a_cancelled_deadline_ends_the_wait_here_and_the_epoch_everywhere() -> None:
    with Epoch() as epoch:
        deadline = Deadline(LIMIT)
        waiting = epoch.start(1, lambda member: member.exchange("vote-1", deadline=deadline))
        others = [epoch.exchange(rank, "other") for rank in (0, 2)]
        reason = TransferAborted("abort was called")
        deadline.cancel(reason)
        assert error_of(waiting) is reason
        for other in others:
            error = error_of(other)
            assert isinstance(error, PeerFailed)
            assert str(error) == "[worker rank 0] abort was called"


def test_an_answer_on_its_way_wins_over_a_cancelled_deadline() -> None:
    with Epoch(workers=1) as epoch:
        deadline = Deadline(LIMIT)
        for number in range(50):
            phase = f"vote-{number}"
            waiting = epoch.start(1, lambda member, phase=phase: member.exchange(phase, deadline=deadline))  # type: ignore[misc]
            decided = epoch.exchange(0, phase)
            if number == 40:
                deadline.cancel(TransferAborted("abort"))
            if decided.exception(LIMIT) is not None:
                assert waiting.exception(LIMIT) is not None
                break
            # Whatever one member was told, the other one was told too.
            assert number >= 40 or waiting.result(LIMIT).unanimous


def test_fail_reaches_everybody_in_the_words_of_the_sender() -> None:
    with Epoch() as epoch:
        waiting = epoch.exchange(0, "vote-1")
        deadline = Deadline(LIMIT)
        with epoch.members[2].watch(deadline):
            own = SourceMismatch("layer.0 is missing", transport="nccl")
            epoch.members[1].fail(own)
            epoch.members[1].fail(TransferError("a later one"))
            error = error_of(waiting)
            assert type(error) is PeerFailed
            assert str(error) == "[nccl, worker rank 0] layer.0 is missing"
            with pytest.raises(PeerFailed, match="layer.0 is missing"):
                deadline.sleep(LIMIT)
        assert epoch.members[1].failure is own
        assert [member.failed_rank for member in epoch.members] == [1, 1, 1]
        assert not epoch.members[0].closed
        for rank in range(3):
            with pytest.raises(SourceMismatch if rank == 1 else PeerFailed, match="layer.0 is missing"):
                epoch.members[rank].exchange("vote-2", deadline=Deadline(LIMIT))


def test_who_was_lost_stays_who_was_lost() -> None:
    with Epoch() as epoch:
        waiting = epoch.exchange(2, "vote-1")
        epoch.members[0].fail(PeerStalled("worker rank 0 took nothing for 5 s"))
        error = error_of(waiting)
        assert isinstance(error, PeerStalled)
        assert str(error) == "[trainer rank 0] worker rank 0 took nothing for 5 s"


def test_watching_a_dead_epoch_cancels_at_once_and_watching_ends_with_the_block() -> None:
    with Epoch(workers=1) as epoch:
        before, after = Deadline(LIMIT), Deadline(LIMIT)
        with epoch.members[0].watch(before):
            pass
        epoch.members[0].fail(TransferError("no"))
        assert before.cancelled is None
        with epoch.members[0].watch(after):
            assert isinstance(after.cancelled, TransferError)


def test_one_failure_is_many_exceptions() -> None:
    # One object raised in many threads would collect all their frames, and what those hold.
    with Epoch(workers=1) as epoch:
        epoch.members[0].fail(TransferError("no"))
        errors = [error_of(epoch.exchange(0, f"vote-{number}")) for number in range(2)]
        assert errors[0] is not errors[1]
        assert epoch.members[0].failure is not None
        assert epoch.members[0].failure.__traceback__ is None


def test_leaving_is_no_failure_until_somebody_waits() -> None:
    with Epoch() as epoch:
        epoch.members[2].close()
        assert epoch.members[0].failure is None
        error = error_of(epoch.exchange(0, "vote-1"))
        assert isinstance(error, PeerLost)
        assert "worker rank 1 (pid " in str(error)
        assert "left after join, and others wait for exchange 'vote-1'" in str(error)


def test_leaving_while_others_wait_is_a_failure_that_names_the_leaver() -> None:
    with Epoch() as epoch:
        waiting = [epoch.exchange(rank, "vote-1") for rank in (0, 1)]
        epoch.members[2].close()
        for future in waiting:
            error = error_of(future)
            assert isinstance(error, PeerLost)
            assert "worker rank 1 (pid " in str(error)


def test_a_host_that_closes_is_no_error_of_the_members() -> None:
    with Epoch() as epoch:
        waiting = epoch.exchange(1, "begin-1")
        deadline = Deadline(LIMIT)
        with epoch.members[2].watch(deadline):
            epoch.members[0].close()
            with pytest.raises(PeerLost, match="the trainer closed this epoch"):
                deadline.sleep(LIMIT)
        assert isinstance(error_of(waiting), PeerLost)
        assert [member.closed for member in epoch.members[1:]] == [True, True]
        with pytest.raises(PeerLost, match="the trainer closed this epoch"):
            epoch.members[1].exchange("begin-2", deadline=Deadline(LIMIT))


def test_closing_here_ends_calls_that_wait_here() -> None:
    with Epoch() as epoch:
        waiting = [epoch.exchange(rank, "vote-1") for rank in (0, 1)]
        while len(epoch.members[1]._mailbox._replies) == 0:
            time.sleep(0)
        epoch.members[1].close()
        epoch.members[1].close()
        assert isinstance(error_of(waiting[1]), OrderError)
        assert isinstance(error_of(waiting[0]), PeerLost)
        with pytest.raises(OrderError, match=r"close\(\) was called"):
            epoch.members[1].exchange("vote-2", deadline=Deadline(LIMIT))


def test_a_member_whose_process_forgot_to_close_is_lost_not_left() -> None:
    host = open_epoch(workers=1)
    with RawMember(host.port) as member:
        assert member.hello(1, pid=77)["type"] == "welcome"
        member.say(type="phase", name="transfer-3")
    with pytest.raises(PeerLost, match=r"worker rank 0 \(pid 77\) was lost during transfer-3: its connection closed"):
        host.exchange("vote-3", deadline=Deadline(LIMIT))
    host.close()


def test_a_silent_member_is_stalled() -> None:
    host = open_epoch(workers=1, peer_timeout=0.5)
    with RawMember(host.port) as member:
        member.hello(1, pid=77)
        match = r"worker rank 0 \(pid 77\) has said nothing for 0.5 s, during join"
        with pytest.raises(PeerStalled, match=match):
            host.exchange("hello", deadline=Deadline(LIMIT))
        assert member.hear()["type"] == "failed"
    host.close()


def test_a_member_that_does_not_read_is_dropped(small_frames: None) -> None:
    host = open_epoch(workers=1)
    with RawMember(host.port) as member:
        member.hello(1)

        def send_much() -> None:
            for number in range(100):
                member.post(f"phase-{number}", gather=True)
                host.exchange(f"phase-{number}", deadline=Deadline(LIMIT), payload="x" * 1_000_000)

        with pytest.raises(PeerLost, match="it does not read what it is sent"):
            send_much()
    host.close()


def test_a_payload_over_the_limit_is_an_error_that_takes_part(small_frames: None) -> None:
    with Epoch(workers=1) as epoch:
        other = epoch.exchange(0, "targets", gather=True)
        outcome = epoch.members[1].exchange("targets", deadline=Deadline(LIMIT), payload="x" * (1 << 20))
        with pytest.raises(PayloadTooLarge, match="targets: a message of 1 MiB"):
            outcome.raise_failed()
        with pytest.raises(PayloadTooLarge, match="worker rank 0"):
            other.result(LIMIT).raise_failed()


def test_payloads_that_are_too_large_together_end_the_epoch(small_frames: None) -> None:
    with Epoch(workers=1) as epoch:
        waiting = [epoch.exchange(rank, "targets", gather=True, payload="x" * 600_000) for rank in range(2)]
        for future in waiting:
            error = error_of(future)
            assert isinstance(error, (PayloadTooLarge, PeerFailed))
            assert "targets: all payloads together" in str(error)


def test_something_that_is_not_json_is_the_callers_fault_alone() -> None:
    with Epoch(workers=1) as epoch:
        with pytest.raises(TypeError):
            epoch.members[1].exchange("hello", deadline=Deadline(LIMIT), payload=object())
        assert all(outcome.unanimous for outcome in epoch.all_exchange("hello"))


def test_a_bug_in_the_thread_ends_every_wait() -> None:
    host = open_epoch(workers=2)
    other = join(host.port, 2)
    with RawMember(host.port) as member:
        member.hello(1)
        member.say(type="post")
        with pytest.raises(TransferError, match="KeyError"):
            host.exchange("hello", deadline=Deadline(LIMIT))
        with pytest.raises(PeerLost, match="trainer rank 0"):
            other.exchange("hello", deadline=Deadline(LIMIT))
    host.close()
    other.close()


def test_64_members_in_one_process() -> None:
    with Epoch(trainers=4, workers=60) as epoch:
        for number in range(3):
            contents = {rank: {"agree": {"n": number}, "payload": rank, "gather": rank == 0} for rank in range(64)}
            outcomes = epoch.all_exchange(f"begin-{number}", contents)
            assert all(outcome.unanimous for outcome in outcomes)
            assert outcomes[0].payloads == {rank: rank for rank in range(64)}
        waiting = [epoch.exchange(rank, "vote") for rank in range(1, 64)]
        epoch.members[0].fail(TransferError("enough"))
        assert all(isinstance(error_of(future), PeerFailed) for future in waiting)


def test_members_come_in_any_order_and_while_others_wait() -> None:
    host = open_epoch(workers=3)
    results: list[bool] = []
    members: list[Rendezvous] = []

    def come(rank: int) -> None:
        members.append(join(host.port, rank))
        results.append(members[-1].exchange("hello", deadline=Deadline(LIMIT)).unanimous)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (3, 1, 2)]
    for thread in threads:
        thread.start()
    assert host.exchange("hello", deadline=Deadline(LIMIT)).unanimous
    for thread in threads:
        thread.join(LIMIT)
    assert results == [True] * 3
    host.close()
    for member in members:
        member.close()


def test_a_name_used_by_nobody_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(MessageError, match="16 bytes of secret"):
        Rendezvous.host(trainers=1, workers=1, secret=b"short", epoch=1)
    with pytest.raises(MessageError, match=r"cannot listen on 192\.0\.2\.1:0"):
        Rendezvous.host(address="192.0.2.1", trainers=1, workers=1, secret=SECRET, epoch=1)
    host = open_epoch(workers=1)
    with pytest.raises(Busy, match=f"cannot listen on 127.0.0.1:{host.port}"):
        open_epoch(workers=1, port=host.port)
    host.close()
