from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.sparse.tests.tracked import TrackedSource, Truth, flip, tensors
from plugins.sparse.tests.tracked import made as made
from plugins.sparse.tests.tracked import small_parts as small_parts
from weightwire.errors import MessageError, SourceMismatch
from weightwire.layout import ParamMeta
from weightwire.source import StateDictSource
from weightwire.testing.strategies import DTYPES, dtypes, metadata_lists
from weightwire_sparse.changes import Changes
from weightwire_sparse.history import History
from weightwire_sparse.memory import Pool
from weightwire_sparse.tracker import DeltaTracker

RANKS = 4
KERNELS: tuple[Literal["numpy", "numba"], ...] = ("numpy", "numba")


@st.composite
def metadata(draw: st.DrawFn) -> list[ParamMeta]:
    """Some large enough to be cut, some of which many are looked at as one; complex128 too."""
    drawn = draw(metadata_lists(max_size=5, max_ranks=RANKS))
    more = draw(st.lists(st.tuples(dtypes() | st.just(torch.complex128), st.integers(1, 700)), max_size=5))
    return drawn + [ParamMeta(f"more.{place}.of", dtype, (size,)) for place, (dtype, size) in enumerate(more)]


STEPS = st.sampled_from(["few", "some", "all", "none", "find", "find", "find", "look", "take", "free", "fail"])


@given(
    metadata=metadata(),
    rank=st.integers(0, RANKS - 1),
    resident=st.booleans(),
    kernels=st.sampled_from(KERNELS),
    history_bytes=st.sampled_from((None, 400)),
    steps=st.lists(STEPS, max_size=12),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_history_is_told_as_it_was(
    metadata: list[ParamMeta],
    rank: int,
    resident: bool,
    kernels: Literal["numpy", "numba"],
    history_bytes: int | None,
    steps: list[str],
    seed: int,
) -> None:
    random = Random(seed)
    source = TrackedSource(metadata, rank, random, resident=resident)
    tracker = DeltaTracker(source, rank=rank, trainers=RANKS, kernels=kernels, history_bytes=history_bytes)
    truth, ready, oldest = Truth(tracker, source), False, 0
    try:
        for step in ("take", *steps, "find"):
            mark = max(truth.states, default=0)
            if step in (shares := {"few": 0.05, "some": 0.4, "all": 1.0, "none": 0.0}):
                source.change(random, shares[step])
            elif step == "take" or (step == "find" and not ready):
                ready, oldest = True, tracker.take()
                truth.states[oldest] = truth.present()
            elif step == "find":
                mark = tracker.find()
                truth.states[mark] = truth.present()
            elif step == "free":
                ready, mark = False, tracker.take(hold=False)
                truth.states[mark] = truth.present()
            elif step == "look":
                names = [meta.name for meta in metadata if random.random() < 0.5]
                truth.looked.add(max(truth.states) + 1)
                tracker.look(names)
                source.change(random, 0.1, [name for name in names if random.random() < 0.5])
            elif step == "fail" and ready and (owned := source.owned_names(rank)):
                source.fails_at = random.randrange(len(owned))
                with pytest.raises(RuntimeError, match="gone"):
                    tracker.find() if random.random() < 0.5 else tracker.take()
                source.fails_at, ready = None, False
            if history_bytes is not None:
                ready = ready and tracker.ready  # more may have been found than there is room for
            assert tracker.ready == ready
            for mark in truth.states:
                found = tracker.since(mark)
                if ready and mark >= oldest and history_bytes is None:
                    assert found is not None
                if found is not None:
                    assert ready and mark >= oldest
                    truth.check(mark, found)
            assert tracker.history_held_bytes <= (history_bytes or 16 << 20)
    finally:
        tracker.shutdown()


@given(
    metadata=metadata(),
    rank=st.integers(0, RANKS - 1),
    resident=st.booleans(),
    looks=st.lists(st.booleans(), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_hashes_find_whole_blocks(
    metadata: list[ParamMeta], rank: int, resident: bool, looks: list[bool], seed: int
) -> None:
    random = Random(seed)
    source = TrackedSource(metadata, rank, random, resident=resident)
    tracker = DeltaTracker(source, rank=rank, trainers=RANKS, snapshot="hash", block_bytes=64)
    truth = Truth(tracker, source)
    try:
        mark = tracker.take()
        truth.states[mark] = truth.present()
        for look in looks:
            source.change(random, 0.02)
            if look:
                tracker.look([meta.name for meta in metadata])
                source.change(random, 0.02)
            before, mark = mark, tracker.find()
            truth.states[mark] = truth.present()
            truth.looked.add(mark)  # may find more
            found = tracker.since(before)
            assert found is not None
            truth.check(before, found)
            assert_in_blocks(truth, before, set(found.addresses.tolist()), 64, exact=not look)
            assert before == 1 or tracker.since(before - 1) is None
        assert not tracker.holds_pieces
    finally:
        tracker.shutdown()


def assert_in_blocks(truth: Truth, mark: int, found: set[int], block: int, *, exact: bool) -> None:
    """All of a block or nothing, and nothing of a block that nothing was found in."""
    changed, space = truth.changed_since(mark), truth.tracker.space
    for piece, first in zip(space.pieces, space.firsts.tolist(), strict=False):
        size = block // piece.dtype.itemsize
        for start in range(0, piece.numel, size):
            addresses = set(range(first + start, first + min(start + size, piece.numel)))
            assert addresses <= found or not addresses & found
            assert not exact or bool(addresses & changed) == bool(addresses & found)


def test_hashes_take_a_thousandth(made: Callable[..., DeltaTracker]) -> None:
    tracker = made(StateDictSource({"a": torch.zeros(1 << 20)}), snapshot="hash")
    tracker.take()
    assert 0 < tracker.snapshot_bytes <= (4 << 20) / 1000


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128])
def test_every_dtype(made: Callable[..., DeltaTracker], dtype: torch.dtype, kernels: str) -> None:
    weights = tensors({"a": 333, "b": 1, "c": 64, "d": 7}, dtype)
    tracker = made(StateDictSource(weights), kernels=kernels)
    mark = tracker.take()
    assert tracker.kernels == kernels and tracker.holds_pieces
    flip(weights["a"], Random(1), 1.0)
    flip(weights["d"], Random(2), 1.0)

    tracker.find()

    found = tracker.since(mark)
    assert found is not None
    assert found.addresses.tolist() == [*range(333), *range(333 + 1 + 64, 333 + 1 + 64 + 7)]
    assert found.values.tobytes() == weights["a"].view(torch.uint8).numpy().tobytes() + bytes(
        weights["d"].view(torch.uint8).numpy()
    )
    assert tracker.held(0).tobytes() == bytes(weights["a"].view(torch.uint8).numpy())


def test_of_a_rank_that_sends_nothing_there_is_nothing(made: Callable[..., DeltaTracker]) -> None:
    source = TrackedSource([ParamMeta("a", torch.float32, (3,))], 1, Random(0), resident=False)
    tracker = made(source, rank=1, trainers=2)
    mark = tracker.take()
    source.change(Random(1), 1.0)
    assert tracker.find() == mark + 1
    found = tracker.since(mark)
    assert found is not None and not found.addresses.size and not found.values.size
    assert tracker.snapshot_bytes == 0 and tracker.sampled() is None


@pytest.mark.parametrize("error", [RuntimeError("gone"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("way", ["find", "take"])
def test_after_a_failure_only_a_dense_round_is_right(
    made: Callable[..., DeltaTracker], way: str, error: BaseException
) -> None:
    metadata = [ParamMeta(f"p{place}", torch.bfloat16, (500,)) for place in range(8)]
    source = TrackedSource(metadata, 0, Random(0), resident=False)
    tracker = made(source)
    mark = tracker.take()
    source.change(Random(1), 0.3)
    source.fails_at, source.error = 4, error
    with pytest.raises(type(error)):
        getattr(tracker, way)()

    assert not tracker.ready and tracker.since(mark) is None and tracker.oldest is None
    assert tracker.history_held_bytes == 0
    with pytest.raises(AssertionError):
        tracker.find()
    source.fails_at = None
    truth = Truth(tracker, source)
    truth.states[after := tracker.take()] = truth.present()
    assert tracker.since(mark) is None
    source.change(Random(2), 0.3)
    truth.states[tracker.find()] = truth.present()
    found = tracker.since(after)
    assert found is not None
    truth.check(after, found)


def test_a_source_that_changed_is_refused(made: Callable[..., DeltaTracker]) -> None:
    weights = tensors({"a": 300, "b": 300})
    tracker = made(StateDictSource(weights))
    tracker.take()
    tracker.source = StateDictSource(tensors({"a": 300, "c": 300}))
    tracker.look(["a"])
    with pytest.raises(SourceMismatch, match="'c'"):
        tracker.find()
    assert not tracker.ready


def test_more_than_there_is_room_for_makes_the_next_round_dense(made: Callable[..., DeltaTracker]) -> None:
    weights = tensors({"a": 4000})
    tracker = made(StateDictSource(weights), history_bytes=1000)
    first = tracker.take()
    flip(weights["a"], Random(0), 1.0)
    tracker.find()
    assert tracker.since(first) is None and not tracker.ready
    assert tracker.history_held_bytes == 0
    mark = tracker.take()
    weights["a"][7] = 77
    tracker.find()
    found = tracker.since(mark)
    assert found is not None and found.addresses.tolist() == [7]


@pytest.mark.parametrize("gap", [1, 300, 70_000, 1 << 33])
def test_addresses_of_earlier_finds_are_held_in_little_memory(gap: int) -> None:
    pool = Pool()
    history = History(1 << 30, pool, only_last=False)
    history.restart(1)
    found = [np.arange(1000, dtype=np.int64) * gap + start for start in (5, 0, 5)]
    for mark, addresses in enumerate(found, 2):
        history.compact()
        history.append(mark, [Changes(addresses, np.zeros(1000, np.uint8))])
    changes = history.since(1, lambda addresses: np.ones(len(addresses), np.uint8))
    assert changes is not None and changes.values.all()
    assert changes.addresses.tolist() == np.unique(np.concatenate(found)).tolist()
    assert history.nbytes <= 9000 + 2 * 1000 * (2 if gap < 1 << 16 else 4 if gap < 1 << 32 else 8)


def test_a_snapshot_is_taken_while_somebody_else_goes_over_the_source(made: Callable[..., DeltaTracker]) -> None:
    weights = tensors({"a": 3000, "b": 5})
    tracker = made(StateDictSource(weights))
    taking = tracker.taking()
    taking.piece(0, weights["a"])
    assert not tracker.ready
    with pytest.raises(AssertionError, match="not given"):
        taking.done()
    assert not tracker.ready
    abandoned, taking = tracker.taking(), tracker.taking()
    taking.piece(1, weights["b"])
    taking.piece(0, weights["a"].view(60, 50).t().contiguous().t().reshape(-1))
    mark = taking.done()
    with pytest.raises(AssertionError, match="another"):
        abandoned.done()
    weights["b"][3] = 9
    tracker.find()
    found = tracker.since(mark)
    assert found is not None and found.addresses.tolist() == [3003]


@pytest.mark.parametrize(
    "options", [{"snapshot": "disk"}, {"threads": 0}, {"history_bytes": -1}, {"block_bytes": 100}, {"kernels": "c"}]
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match=next(iter(options))):
        DeltaTracker(StateDictSource({}), **options)


@pytest.mark.cuda
def test_tensors_on_a_device(made: Callable[..., DeltaTracker]) -> None:
    metadata = [ParamMeta("a", torch.bfloat16, (5000,)), ParamMeta("b", torch.float32, (3, 5))]
    source = TrackedSource(metadata, 0, Random(0), resident=True)
    source.tensors = [tensor.cuda() for tensor in source.tensors]
    tracker = made(source)
    mark = tracker.take()
    tracker.look(["a"])
    source.tensors[0][4321] += 1
    tracker.find()
    found = tracker.since(mark)
    assert found is not None and found.addresses.tolist() == [15 + 4321]
    assert tracker.sampled() is None
    assert tracker.sampled() == 0.0


PROGRAM = """
import torch
from weightwire.source import StateDictSource
from weightwire_sparse.tracker import DeltaTracker
tracker = DeltaTracker(StateDictSource({"a": torch.zeros(100_000)}), kernels="numpy")
tracker.take()
tracker.look(["a"])
"""


def test_its_threads_do_not_keep_a_program_alive() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], timeout=50, check=False).returncode == 0
