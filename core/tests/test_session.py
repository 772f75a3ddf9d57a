"""The session answers every order of calls, repeats answers by id, and lets one thread work at a time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from weightwire.deadline import Deadline
from weightwire.errors import (
    Busy,
    MessageError,
    NotInitialised,
    OrderError,
    Superseded,
    TransferAborted,
    UpdateRefused,
)
from weightwire.session import REMEMBERED_UPDATES, Revision, UpdateSession

ABORTED = TransferAborted("aborted")


def linked_session() -> UpdateSession:
    return UpdateSession(lambda: True)


def start(session: UpdateSession, update_id: str | None = "a", seconds: float = 60.0) -> bool:
    with session.starting(update_id, Deadline(seconds)) as answer:
        return answer.known


def work(session: UpdateSession, call: Any, update_id: str | None = "a", sequence: int | None = None) -> bool:
    with session.working(call, update_id, sequence, Deadline(5)) as answer:
        answer.replay()
        return answer.known


def abort(session: UpdateSession, update_id: str | None = None, dropped: list[str] | None = None) -> bool:
    return session.abort(update_id, Deadline(5), lambda: (dropped or []).append("x"), reason=ABORTED)


def test_a_whole_update() -> None:
    session = linked_session()
    assert session.idle
    assert not start(session)
    assert not session.idle
    assert session.update_id == "a"
    assert not work(session, "update", sequence=0)
    assert not work(session, "finish")
    assert session.update == "none"
    assert session.committed("a")
    assert session.idle


def test_calls_out_of_order_are_refused() -> None:
    session = linked_session()
    with pytest.raises(OrderError, match="update_weights without start"):
        work(session, "update")
    with pytest.raises(OrderError, match="finish_weight_update without start"):
        work(session, "finish")
    start(session)
    with pytest.raises(OrderError, match="start_weight_update while an update is open"):
        start(session, "b")
    with pytest.raises(OrderError, match="for update b while update a is open"):
        work(session, "update", "b", 0)
    shut_down = session.exclusive("shutdown", Deadline(1))
    with pytest.raises(OrderError, match="shutdown is not possible while an update is open"), shut_down:
        pass
    assert session.update == "open"


def test_start_needs_a_trainer() -> None:
    session = UpdateSession(lambda: False)
    with pytest.raises(NotInitialised, match="initialise first"):
        start(session)
    assert session.update == "none"


def test_a_repeated_call_gets_the_same_answer() -> None:
    session = linked_session()
    start(session)
    assert start(session), "start again with the same id"
    work(session, "update", sequence=0)
    assert work(session, "update", sequence=0), "the same message again"
    assert not work(session, "update", sequence=1), "the next message"
    work(session, "finish")
    assert work(session, "finish"), "finish again after the commit"
    assert work(session, "update", sequence=1), "an answered message after the commit"
    with pytest.raises(OrderError, match="update a is over"):
        start(session)


def test_messages_without_a_number_are_all_new() -> None:
    session = linked_session()
    start(session)
    assert not work(session, "update")
    assert not work(session, "update")


def refuse(session: UpdateSession) -> None:
    with session.working("update", "a", 0, Deadline(5)) as answer:
        answer.replay()
        raise UpdateRefused("no such name")


def test_a_repeated_failure_fails_the_same_way() -> None:
    session = linked_session()
    start(session)
    for _ in range(2):
        with pytest.raises(UpdateRefused, match="no such name"):
            refuse(session)
    assert session.update == "none"
    with pytest.raises(OrderError, match="update a is over: no such name"):
        work(session, "finish")
    start(session, "b")


def test_old_updates_are_forgotten() -> None:
    session = linked_session()
    for number in range(REMEMBERED_UPDATES + 1):
        start(session, str(number))
        work(session, "finish", str(number))
    assert session.committed(str(REMEMBERED_UPDATES))
    assert not session.committed("0")
    for number in range(50):
        start(session, f"aborted {number}")
        abort(session)
    assert len(session._answers) <= REMEMBERED_UPDATES
    assert len(session._ended) <= REMEMBERED_UPDATES


def test_a_repetition_waits_for_the_first() -> None:
    session = linked_session()
    start(session)
    inside, go, answers = threading.Event(), threading.Event(), []

    def first() -> None:
        with session.working("update", "a", 0, Deadline(10)):
            inside.set()
            go.wait(10)

    def second() -> None:
        answers.append(work(session, "update", "a", 0))

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(5)
    assert session.update == "receiving"
    threads[1].start()
    with pytest.raises(OrderError, match="busy with update"):
        work(session, "update", "a", 1)
    assert not answers
    go.set()
    for thread in threads:
        thread.join(5)
    assert answers == [True]


def test_abort_drops_an_open_update_once() -> None:
    session = linked_session()
    dropped: list[str] = []
    assert not abort(session, dropped=dropped), "nothing to abort"
    start(session)
    assert not abort(session, "b", dropped), "another update's id"
    assert session.abort("a", Deadline(5), lambda: dropped.append("x"), reason=ABORTED)
    assert dropped == ["x"]
    assert session.update == "none"
    with pytest.raises(OrderError, match="update a is over: aborted"):
        work(session, "update", "a", 0)


def test_abort_cancels_the_working_thread_and_waits_for_it() -> None:
    session = linked_session()
    start(session)
    inside, errors = threading.Event(), []

    def receive() -> None:
        deadline = Deadline(10)
        try:
            with session.working("update", "a", 0, deadline):
                inside.set()
                deadline.sleep(10)
        except TransferAborted as error:
            errors.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    assert inside.wait(5)
    assert abort(session, "a")
    assert session.update == "none"
    thread.join(5)
    assert errors == ["aborted"]


def test_a_message_that_ends_well_before_it_hears_of_the_abort_does_not_keep_the_update_open() -> None:
    session = linked_session()
    start(session)
    inside, dropped = threading.Event(), ["kept"]

    def receive() -> None:
        deadline = Deadline(10)
        with session.working("update", "a", 0, deadline):
            inside.set()
            while not deadline.cancelled:
                time.sleep(0.001)

    thread = threading.Thread(target=receive)
    thread.start()
    assert inside.wait(5)
    assert abort(session, "a", dropped)
    thread.join(5)
    assert session.update == "none"
    assert dropped == ["kept", "x"]


def test_abort_is_too_late_while_and_after_committing() -> None:
    session = linked_session()
    start(session)
    with session.working("finish", "a", None, Deadline(5)):
        assert session.update == "committing"
        with pytest.raises(OrderError, match="too late"):
            abort(session)
    with pytest.raises(OrderError, match="has committed"):
        abort(session, "a")


def test_init_ends_an_open_update_and_names_the_takeover() -> None:
    session = linked_session()
    start(session)
    with session.initialising(Deadline(5), reason="another trainer took over") as had_update:
        assert had_update
    with pytest.raises(Superseded, match="another trainer took this worker over"):
        work(session, "update", "a", 0)
    start(session, "b")


def test_init_cancels_a_receiving_thread_and_gives_up_on_one_that_does_not_let_go() -> None:
    session = linked_session()
    start(session)
    inside, go = threading.Event(), threading.Event()

    def receive() -> None:
        with session.working("update", "a", 0, Deadline(10)):
            inside.set()
            go.wait(10)

    thread = threading.Thread(target=receive)
    thread.start()
    assert inside.wait(5)
    with pytest.raises(Busy, match="did not end"), session.initialising(Deadline(0.2), reason="again"):
        pass
    go.set()
    thread.join(5)
    with session.initialising(Deadline(5), reason="again"):
        pass


def test_the_lease_of_a_silent_trainer_runs_out() -> None:
    session = linked_session()
    start(session, seconds=0.0)
    assert session.lease_expired
    start_again = linked_session()
    start(start_again, seconds=60.0)
    assert not start_again.lease_expired


def test_a_message_that_is_given_more_time_renews_the_lease() -> None:
    session = linked_session()
    start(session, seconds=0.0)
    assert session.lease_expired
    work(session, "update")
    assert not session.lease_expired


def test_a_revision_travels_as_json() -> None:
    revision = Revision.fresh()
    assert Revision.from_json(revision.to_json()) == revision
    assert Revision.fresh() != revision
    for wrong in ({}, {"lineage": "a"}, {"lineage": 1, "number": 1}, {"lineage": "a", "number": True}):
        with pytest.raises(MessageError):
            Revision.from_json(wrong)
