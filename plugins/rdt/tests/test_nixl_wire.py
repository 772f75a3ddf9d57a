"""Chunks over NIXL between two processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, PeerLost, PeerStalled, TransferError
from weightwire.packing import BufferRing
from weightwire.testing.fixtures import borrowing
from weightwire.testing.pool import RankPool
from weightwire.testing.pool_process import Rank
from weightwire.testing.pool_rank import at_tidy, count_no_leftovers
from weightwire_rdt.nixl_agent import process_agent
from weightwire_rdt.nixl_wire import NixlReading, NixlServing, Peer
from weightwire_rdt.pulling import Chunk

State = dict[str, Any]
T = TypeVar("T")
SECONDS = 20.0
NOTICED = 2.0
LARGE = 4 << 20  # memory that goes back to the system when it is freed


# In the ranks


def introduce(state: State) -> tuple[str, bytes]:
    count_no_leftovers()
    agent = process_agent()
    return agent.name, agent.metadata()


def open_wire(state: State, side: str, other: tuple[str, bytes], stall: float) -> None:
    agent = process_agent()
    agent.meet(*other)
    if side == "trainer":
        peer = Peer("worker rank 0", other[0], "link/w0")
        state["wire"] = NixlServing(agent, 0, {0: peer}, label="trainer rank 0", box="link/t0", stall=stall)
    else:
        peer = Peer("trainer rank 0", other[0], "link/t0")
        state["wire"] = NixlReading(agent, 0, {0: peer}, label="worker rank 0", box="link/w0", stall=stall)
    state["stop"] = threading.Event()
    at_tidy(state["wire"].close)


def begin(state: State, number: int) -> None:
    state["wire"].begin_round(number)


def content(seed: int, nbytes: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def offer(state: State, seed: int, sizes: Sequence[int], apart: bool = True, keep: bool = False) -> list[int]:
    """Offer a chunk, of buffers of their own or all in one; returns where they lie.

    They live until they have been read, or longer if they are to be kept.
    """
    whole = content(seed, sum(sizes))
    parts = [part.clone() if apart else part for part in torch.split(whole, list(sizes))]
    if keep:
        state["kept"] = parts
    handle = state["wire"].send(parts, [0], deadline=Deadline(SECONDS))
    state.setdefault("handles", []).append(handle)
    return [part.data_ptr() for part in parts]


def free(state: State) -> None:
    """Let go of what was offered, once it has been read."""
    state["wire"].flush(Deadline(SECONDS))
    state["handles"].clear()


def unread(state: State) -> set[tuple[int, int]]:
    found: set[tuple[int, int]] = state["wire"].unread()
    return found


def flush(state: State, seconds: float = SECONDS) -> None:
    state["wire"].flush(Deadline(seconds))


def pull(state: State, chunks: dict[int, Sequence[int]], seconds: float = SECONDS) -> list[bytes]:
    """Read chunks together; returns the bytes of each."""
    wire, deadline = state["wire"], Deadline(seconds)
    state["buffers"] = {at: [torch.zeros(size, dtype=torch.uint8) for size in chunks[at]] for at in chunks}
    for ordinal in chunks:
        while not wire.ready(0, ordinal):
            wire.pause(deadline, [0])
    arriving = wire.receive([Chunk(*each) for each in state["buffers"].items()], 0, deadline)
    while not arriving.done:
        wire.pause(deadline, [0])
    return [torch.cat(parts).numpy().tobytes() for parts in state.pop("buffers").values()]


def pull_in_vain(state: State, chunks: dict[int, Sequence[int]]) -> tuple[str, str, bool]:
    """What reading raises, in words, and whether nothing was written."""
    with pytest.raises(TransferError) as caught:
        pull(state, chunks)
    untouched = not any(bool(part.any()) for parts in state["buffers"].values() for part in parts)
    return type(caught.value).__name__, str(caught.value), untouched


def poll(state: State) -> None:
    """Hear what is read, as a trainer rank does all the time in a round; UCX moves nothing otherwise."""
    while not state["stop"].wait(0.0005):
        state["wire"].unread()
    state["stop"].clear()


def stop(state: State) -> None:
    state["stop"].set()


def ready(state: State, ordinal: int) -> bool:
    found: bool = state["wire"].ready(0, ordinal)
    return found


# The test process


class Pair:
    """A trainer rank and a worker rank, linked."""

    def __init__(self, lent: Sequence[Rank], *, trainer: float = SECONDS, worker: float = SECONDS) -> None:
        self.trainer, self.worker = lent
        names = [rank.call(introduce) for rank in lent]
        self.worker.call(open_wire, "worker", names[0], worker)
        self.trainer.call(open_wire, "trainer", names[1], trainer)
        self.begin(1)

    def begin(self, number: int) -> None:
        for rank in (self.trainer, self.worker):
            rank.call(begin, number)

    def pull(self, chunks: dict[int, Sequence[int]]) -> list[bytes]:
        """What the worker reads, with the trainer rank at its wire."""
        return self.polled(pull, chunks)

    def polled(self, function: Callable[..., T], *arguments: Any) -> T:
        """Have the worker do something with the trainer rank at its wire."""
        polling = self.trainer.start(poll)
        try:
            return self.worker.call(function, *arguments)
        finally:
            self.trainer.call(stop)
            polling.result()


@pytest.fixture
def two(pool: RankPool, request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    """Two ranks that are in no cluster."""
    lending = borrowing(pool, request.node.nodeid, strict=False)
    yield next(lending)(2)
    next(lending, None)


def expected(seed: int, sizes: Sequence[int]) -> bytes:
    return bytes(content(seed, sum(sizes)).numpy().tobytes())


def test_chunks_that_are_packed_and_in_place(two: list[Rank]) -> None:
    pair = Pair(two)
    sizes: list[list[int]] = [[1], [16, 3, 4096], [LARGE, 7], [64, 64]]
    for number in (1, 2, 3):
        pair.begin(number)
        for at, of in enumerate(sizes):
            pair.trainer.call(offer, 10 * number + at, of, apart=at % 2 == 0)
        assert pair.trainer.call(unread) == {(0, at) for at in range(4)}
        assert pair.pull({0: sizes[0]}) == [expected(10 * number, sizes[0])]
        together = pair.pull({at: sizes[at] for at in (1, 2, 3)})
        assert together == [expected(10 * number + at, sizes[at]) for at in (1, 2, 3)]
        pair.trainer.call(flush)
        assert pair.trainer.call(unread) == set()


def test_memory_that_is_freed_and_comes_again_is_never_read_stale(two: list[Rank]) -> None:
    """Another size, or other pages, at an address that was registered: between rounds, and within one."""
    pair = Pair(two)
    addresses: list[int] = []
    for number, size in enumerate([LARGE, LARGE, LARGE // 2, LARGE, 2 * LARGE, LARGE]):
        pair.begin(number)
        for at in range(3):
            addresses += pair.trainer.call(offer, 10 * number + at, [size])
            assert pair.pull({at: [size]}) == [expected(10 * number + at, [size])]
            pair.trainer.call(free)
    assert len(set(addresses)) < len(addresses), "no address came again: this proves nothing"


def test_a_reader_that_never_reads(two: list[Rank]) -> None:
    pair = Pair(two, trainer=0.3)
    pair.trainer.call(offer, 1, [50])
    with pytest.raises(
        PeerStalled, match=r"nothing has moved for 0\.3 s: trainer rank 0 waits for worker rank 0 to read"
    ):
        pair.trainer.call(flush)
    assert pair.pull({0: [50]}) == [expected(1, [50])]
    pair.trainer.call(flush)


def test_offers_of_an_earlier_round_are_not_there_any_more(two: list[Rank]) -> None:
    pair = Pair(two)
    pair.trainer.call(offer, 1, [50])
    assert pair.polled(ready_soon, 0)
    pair.begin(2)
    assert not pair.worker.call(ready, 0)
    pair.trainer.call(offer, 2, [50])
    assert pair.polled(ready_soon, 0)
    assert pair.pull({0: [50]}) == [expected(2, [50])]
    pair.trainer.call(flush)


def test_a_trainer_rank_that_offers_nothing(two: list[Rank]) -> None:
    pair = Pair(two, worker=0.3)
    with pytest.raises(PeerStalled, match="worker rank 0 waits for trainer rank 0 to have its next parameters ready"):
        pair.pull({0: [50]})


def test_what_waits_ends_with_its_deadline(two: list[Rank]) -> None:
    pair = Pair(two)
    with pytest.raises(DeadlineExceeded, match="trainer rank 0 to have its next parameters ready"):
        pair.worker.call(pull, {0: [50]}, 0.1)
    pair.trainer.call(offer, 1, [50])
    with pytest.raises(DeadlineExceeded, match="trainer rank 0 waits for worker rank 0 to read"):
        pair.trainer.call(flush, 0.1)


def test_an_offer_of_other_sizes(two: list[Rank]) -> None:
    """Also where it is only the last of several chunks: nothing of any is written."""
    pair = Pair(two)
    pair.trainer.call(offer, 1, [50, 60])
    pair.trainer.call(offer, 2, [50, 60])
    raised, words, untouched = pair.worker.call(pull_in_vain, {0: [50, 60], 1: [50, 61]})
    assert raised == "TransferError"
    assert "trainer rank 0 offers [50, 60] bytes where [50, 61] were asked for" in words
    assert untouched
    assert pair.trainer.call(unread) == {(0, 0), (0, 1)}


def test_messages_of_an_earlier_round_are_ignored(two: list[Rank]) -> None:
    pair = Pair(two)
    pair.trainer.call(offer, 2, [50])
    pair.trainer.call(offer, 1, [70], keep=True)
    # The trainer rank gives up, and begins again while the worker still reads.
    pair.trainer.call(begin, 2)
    pair.trainer.call(offer, 3, [50])
    pair.trainer.call(offer, 4, [70])
    assert pair.pull({1: [70]}) == [expected(1, [70])]
    assert pair.trainer.call(unread) == {(0, 0), (0, 1)}
    pair.worker.call(begin, 2)
    assert pair.pull({1: [70], 0: [50]}) == [expected(4, [70]), expected(3, [50])]
    pair.trainer.call(flush)


def reuse(state: State) -> tuple[bool, str]:
    """Offer the one buffer of a ring, and try to have it again."""
    state["ring"] = ring = BufferRing(1, 64, "cpu")
    slot = ring.acquire(Deadline(SECONDS))
    slot.buffer.copy_(content(1, 64))
    slot.release(after=state["wire"].send([slot.buffer], [0], deadline=Deadline(SECONDS)))
    with pytest.raises(DeadlineExceeded) as caught:
        ring.acquire(Deadline(0.1))
    return ring.try_acquire() is None, str(caught.value)


def overwrite(state: State) -> None:
    slot = state["ring"].acquire(Deadline(SECONDS))
    slot.buffer.zero_()
    slot.release(after=state["wire"].send([slot.buffer], [0], deadline=Deadline(SECONDS)))


def test_a_buffer_is_used_again_once_it_was_read(two: list[Rank]) -> None:
    pair = Pair(two)
    nothing_free, words = pair.trainer.call(reuse)
    assert nothing_free
    assert "worker rank 0 to read" in words
    overwriting = pair.trainer.start(overwrite)
    assert pair.worker.call(pull, {0: [64]}) == [expected(1, [64])]
    overwriting.result()
    assert pair.pull({1: [64]}) == [bytes(64)]


# Deaths


def test_a_trainer_rank_that_died_before_it_was_read(two: list[Rank]) -> None:
    pair = Pair(two)
    pair.trainer.call(offer, 1, [LARGE, 5])
    assert pair.polled(ready_soon, 0)
    pair.trainer.kill()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="trainer rank 0: .*the other process is gone"):
        pair.worker.call(pull, {0: [LARGE, 5]})
    assert time.monotonic() - began < NOTICED


def ready_soon(state: State, ordinal: int) -> bool:
    deadline = Deadline(SECONDS)
    while not state["wire"].ready(0, ordinal):
        state["wire"].pause(deadline, [0])
    return True


def offer_and_flush(state: State) -> None:
    offer(state, 2, [50])
    flush(state)


def test_a_worker_that_died_before_something_was_offered(two: list[Rank]) -> None:
    pair = Pair(two, trainer=1.0)
    pair.trainer.call(offer, 1, [50])
    pair.pull({0: [50]})
    pair.worker.kill()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="worker rank 0"):
        pair.trainer.call(offer_and_flush)
    assert time.monotonic() - began < NOTICED


def test_reads_go_on_while_the_trainer_rank_does_something_else(two: list[Rank]) -> None:
    pair = Pair(two)
    for ordinal in range(2):  # they are connected once each has heard of the other
        pair.trainer.call(offer, ordinal, [50])
        pair.pull({ordinal: [50]})
        pair.trainer.call(flush)
    pair.trainer.call(offer, 2, [50, 1 << 22])
    assert pair.worker.call(pull, {2: [50, 1 << 22]}, 3.0) == [expected(2, [50, 1 << 22])]
    pair.trainer.call(flush)


class _Ending:
    ended = False


def wait_for_the_end(state: State) -> list[int]:
    """How often it was told, after each step."""
    agent, told, one, other = process_agent(), [0], _Ending(), _Ending()
    agent.once_ended([one, other], lambda: told.__setitem__(0, told[0] + 1))
    steps = [told[0]]
    for ending in (one, other, other):
        ending.ended = True
        agent.poll()
        steps.append(told[0])
    agent.once_ended([], lambda: told.__setitem__(0, told[0] + 1))
    return [*steps, told[0]]


def test_what_is_still_on_its_way_is_kept_until_it_has_ended(two: list[Rank]) -> None:
    assert two[0].call(wait_for_the_end) == [0, 0, 1, 1, 2]
