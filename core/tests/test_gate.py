from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable

import pytest

from core.tests.threads import SOON, pending, started
from weightwire.deadline import Deadline
from weightwire.errors import Busy, DeadlineExceeded, Paused, WeightsTorn
from weightwire.gate import Gate, PauseMode


class Reader:
    """A reader in a thread of its own that stays until told to leave."""

    def __init__(self, gate: Gate) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.cancelled = False
        self.done = started(lambda: self._read(gate))

    def _read(self, gate: Gate) -> None:
        with gate.reading() as hold:
            self.inside.set()
            assert self.leave.wait(20)
            self.cancelled = hold.cancelled

    def end(self) -> None:
        self.leave.set()
        self.done.result(20)


def reader_inside(gate: Gate) -> Reader:
    reader = Reader(gate)
    assert reader.inside.wait(20)
    return reader


def read_once(gate: Gate) -> str:
    with gate.reading():
        return "read"


def test_many_readers_at_once() -> None:
    gate = Gate()
    readers = [reader_inside(gate) for _ in range(3)]
    assert gate.readers == 3
    for reader in readers:
        reader.end()
    assert gate.readers == 0


def test_a_writer_waits_for_readers_and_new_readers_for_the_writer() -> None:
    gate = Gate()
    reader = reader_inside(gate)
    inside, leave = threading.Event(), threading.Event()

    def write() -> None:
        with gate.exclusive(Deadline(20)):
            assert gate.readers == 0
            inside.set()
            assert leave.wait(20)

    writer = started(write)
    assert pending(writer)
    late = started(lambda: read_once(gate))
    assert pending(late), "the gate prefers the writer"
    reader.end()
    assert inside.wait(20)
    assert pending(late)
    leave.set()
    writer.result(20)
    assert late.result(20) == "read"


def test_a_writer_gives_up_at_its_deadline_and_the_gate_opens() -> None:
    gate = Gate()
    reader = reader_inside(gate)
    with pytest.raises(Busy, match="1 readers did not finish"), gate.exclusive(Deadline(0.05)):
        pass
    assert read_once(gate) == "read"
    reader.end()


def test_a_cancelled_writer_raises_the_reason_and_the_gate_opens() -> None:
    gate = Gate()
    reader = reader_inside(gate)
    deadline = Deadline(20)
    writer = started(lambda: gate.close(deadline))
    assert pending(writer)
    deadline.cancel(RuntimeError("aborted"))
    with pytest.raises(RuntimeError, match="aborted"):
        writer.result(20)
    assert read_once(gate) == "read"
    reader.end()


def test_writers_take_turns() -> None:
    gate = Gate()
    gate.close(Deadline(20))
    with pytest.raises(Busy, match="another commit"):
        gate.close(Deadline(0.05))
    second = started(lambda: gate.close(Deadline(20)))
    assert pending(second)
    gate.open()
    second.result(20)
    gate.open()
    assert read_once(gate) == "read"


def test_a_hold_is_taken_again_although_a_writer_waits() -> None:
    gate = Gate()
    with gate.reading():
        writer = started(lambda: gate.close(Deadline(20)))
        assert pending(writer)
        with gate.reading(), gate.reading():
            assert gate.readers == 1
        assert pending(writer)
    writer.result(20)
    gate.open()


def test_a_hold_goes_with_its_context_into_other_threads() -> None:
    gate = Gate()
    with gate.reading():
        writer = started(lambda: gate.close(Deadline(20)))
        assert pending(writer)
        context = contextvars.copy_context()
        assert started(lambda: context.run(read_once, gate)).result(20) == "read"
        assert pending(started(lambda: read_once(gate))), "a thread without the context is another reader"
    writer.result(20)
    gate.open()


def test_a_copied_context_does_not_hold_after_its_origin_has_left() -> None:
    gate = Gate()
    with gate.reading():
        context = contextvars.copy_context()
    gate.close(Deadline(20))
    reader = started(lambda: context.run(read_once, gate))
    assert pending(reader)
    gate.open()
    assert reader.result(20) == "read"


def test_a_copied_context_prolongs_the_hold_of_its_origin() -> None:
    gate = Gate()
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with gate.reading():
            inside.set()
            assert leave.wait(20)

    with gate.reading():
        context = contextvars.copy_context()
        child = started(lambda: context.run(read))
        assert inside.wait(20)
    writer = started(lambda: gate.close(Deadline(20)))
    assert pending(writer)
    leave.set()
    child.result(20)
    writer.result(20)
    gate.open()


def test_the_writer_itself_may_read() -> None:
    gate = Gate()
    with gate.exclusive(Deadline(20)):
        assert read_once(gate) == "read"
    assert read_once(gate) == "read"
    assert gate.readers == 0


@pytest.mark.parametrize("wait", [lambda gate: gate.close(Deadline(20)), lambda gate: gate.pause()])
def test_a_reader_cannot_wait_for_itself(wait: Callable[[Gate], None]) -> None:
    gate = Gate()
    with gate.reading(), pytest.raises(Busy, match="leave reading"):
        wait(gate)
    assert not gate.paused
    wait(gate)


def test_two_gates_are_independent() -> None:
    one, other = Gate(), Gate()
    with one.reading(), other.exclusive(Deadline(20)):
        assert pending(started(lambda: read_once(other)))
        assert started(lambda: read_once(one)).result(20) == "read"


def test_keep_makes_new_readers_wait() -> None:
    gate = Gate()
    reader = reader_inside(gate)
    pause = started(lambda: gate.pause("keep"))
    assert pending(pause)
    reader.end()
    pause.result(20)
    assert not reader.cancelled
    assert (gate.paused, gate.mode) == (True, "keep")
    late = started(lambda: read_once(gate))
    assert pending(late)
    gate.resume()
    assert late.result(20) == "read"


@pytest.mark.parametrize(("mode", "cancels"), [("wait", False), ("abort", True)])
def test_wait_and_abort_refuse_new_readers(mode: PauseMode, cancels: bool) -> None:
    gate = Gate()
    reader = reader_inside(gate)
    pause = started(lambda: gate.pause(mode))
    assert pending(pause)
    with pytest.raises(Paused, match=mode):
        read_once(gate)
    reader.end()
    pause.result(20)
    assert reader.cancelled is cancels
    with gate.reading(ignore_pause=True) as hold:
        assert not hold.cancelled
    gate.resume()
    assert read_once(gate) == "read"


def test_a_second_pause_changes_the_mode_for_those_who_wait() -> None:
    gate = Gate()
    gate.pause("keep")
    late = started(lambda: read_once(gate))
    assert pending(late)
    gate.pause("wait")
    with pytest.raises(Paused):
        late.result(20)


def test_a_pause_gives_up_and_stays() -> None:
    gate = Gate()
    reader = reader_inside(gate)
    with pytest.raises(DeadlineExceeded):
        gate.pause("wait", deadline=Deadline(0.05))
    assert gate.paused
    reader.end()


def test_a_commit_needs_no_pause_and_works_in_one() -> None:
    gate = Gate()
    gate.pause("wait")
    with gate.exclusive(Deadline(20)):
        pass
    assert gate.paused


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        Gate().pause("sometimes")  # type: ignore[arg-type]


def test_a_block_refuses_all_new_readers_and_those_who_wait() -> None:
    gate = Gate()
    gate.close(Deadline(20))
    waiting = started(lambda: read_once(gate))
    assert pending(waiting)
    gate.block(lambda: WeightsTorn("torn"))
    with pytest.raises(WeightsTorn):
        waiting.result(20)
    gate.open()
    with pytest.raises(WeightsTorn):
        read_once(gate)
    gate.block(None)
    assert read_once(gate) == "read"


def test_a_reader_gives_up_at_its_deadline() -> None:
    gate = Gate()
    gate.pause("keep")
    with pytest.raises(DeadlineExceeded), gate.reading(deadline=Deadline(0.05)):
        pass
    assert gate.readers == 0


def test_an_error_inside_leaves_the_gate() -> None:
    gate = Gate()
    with pytest.raises(KeyError), gate.reading():
        raise KeyError
    with pytest.raises(KeyError), gate.exclusive(Deadline(20)):
        raise KeyError
    assert read_once(gate) == "read"


async def aread(gate: Gate) -> str:
    async with gate.reading():
        await asyncio.sleep(0)
        return "read"


def test_an_async_reader_waits_without_blocking_its_loop() -> None:
    gate = Gate()

    async def main() -> None:
        gate.close(Deadline(20))
        reader = asyncio.create_task(aread(gate))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not reader.done()
        opened = started(gate.open)
        assert await reader == "read"
        opened.result(20)

    asyncio.run(main())
    assert gate.readers == 0


def test_async_readers_are_refused_and_give_up() -> None:
    gate = Gate()

    async def main() -> None:
        gate.pause("keep")
        with pytest.raises(DeadlineExceeded):
            async with gate.reading(deadline=Deadline(0.05)):
                pass
        reader = asyncio.create_task(aread(gate))
        await asyncio.sleep(0)
        gate.pause("abort")
        with pytest.raises(Paused):
            await reader
        gate.resume()
        gate.close(Deadline(20))
        reader = asyncio.create_task(aread(gate))
        await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        gate.open()

    asyncio.run(main())
    assert gate.readers == 0


def test_tasks_hold_apart_and_child_tasks_and_threads_hold_with_their_parent() -> None:
    gate = Gate()

    async def main() -> None:
        async with gate.reading():
            other = started(lambda: gate.close(Deadline(20)))
            await asyncio.sleep(SOON)
            assert await asyncio.create_task(aread(gate)) == "read"
            assert await asyncio.to_thread(read_once, gate) == "read"
            stranger = asyncio.create_task(aread(gate), context=contextvars.Context())
            await asyncio.sleep(SOON)
            assert not stranger.done()
        await asyncio.to_thread(other.result, 20)
        gate.open()
        assert await stranger == "read"

    asyncio.run(main())


def test_a_hold_may_be_used_again_but_not_twice_at_once() -> None:
    gate = Gate()
    hold = gate.reading()
    with hold, pytest.raises(AssertionError):
        hold.__enter__()
    with hold:
        assert gate.readers == 1
    with pytest.raises(AssertionError):
        hold.__exit__(None, None, None)


def test_no_reader_is_ever_inside_with_a_writer() -> None:
    gate, writing, seen = Gate(), threading.Event(), []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with gate.reading():
                seen.append(writing.is_set())

    readers = [started(read) for _ in range(4)]
    for _ in range(200):
        with gate.exclusive(Deadline(20)):
            writing.set()
            assert gate.readers == 0
            writing.clear()
    stop.set()
    for reader in readers:
        reader.result(20)
    assert not any(seen)
