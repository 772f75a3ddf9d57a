from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire import staging
from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded
from weightwire.layout import ParamMeta
from weightwire.packing import (
    ALIGNMENT,
    BufferRing,
    Chunk,
    ChunkItem,
    chunk_views,
    fill_chunk,
    plan_chunks,
    plan_digest,
    unpack_chunk,
)

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex128, torch.float8_e4m3fn, torch.bool]
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> list[ParamMeta]:
    count = draw(st.integers(0, 12))
    return [
        ParamMeta(
            f"p{number}",
            draw(st.sampled_from(DTYPES)),
            draw(SHAPES),
            owners=draw(st.sampled_from([None, (0, 1), (1, 0), (2,)])),
        )
        for number in range(count)
    ]


def plan(model: list[ParamMeta], **options: Any) -> list[Chunk]:
    return plan_chunks(model, **options)


@given(
    model=models(),
    buffer_bytes=st.integers(1, 4000),
    packed=st.booleans(),
    align=st.sampled_from([1, 16, 64]),
    data=st.data(),
)
def test_plan(model: list[ParamMeta], buffer_bytes: int, packed: bool, align: int, data: st.DataObject) -> None:
    pack_below = data.draw(st.none() | st.integers(0, buffer_bytes))
    options = {"buffer_bytes": buffer_bytes, "packed": packed, "pack_below": pack_below, "align": align}
    chunks = plan(model, **options)
    items = [item for chunk in chunks for item in chunk.items]
    assert sorted(item.index for item in items) == list(range(len(model)))
    assert all(item.nbytes == model[item.index].nbytes for item in items)
    for chunk in chunks:
        assert {model[item.index].first_owner for item in chunk.items} == {chunk.sender}
        assert [item.index for item in chunk.items] == sorted(item.index for item in chunk.items)
        assert chunk.nbytes == chunk.items[-1].offset + chunk.items[-1].nbytes
        assert [place for run in chunk.runs for place in range(*run)] == list(range(len(chunk.items)))
        if chunk.packed:
            assert chunk.nbytes <= buffer_bytes
            assert all(item.offset % align == 0 for item in chunk.items)
            assert all(a.offset + a.nbytes <= b.offset for a, b in itertools.pairwise(chunk.items))
        else:
            assert len(chunk.items) == 1 or chunk.nbytes <= 2 * buffer_bytes
            assert all(a.offset + a.nbytes == b.offset for a, b in itertools.pairwise(chunk.items))
    last = [chunk.items[-1].index for chunk in chunks]
    assert last == sorted(last)
    assert plan_digest(chunks) == plan_digest(plan(model, **options))


def test_plan_by_hand() -> None:
    def meta(name: str, size: int, owner: int = 0) -> ParamMeta:
        return ParamMeta(name, torch.uint8, (size,), owners=(owner,))

    model = [meta("a", 10), meta("b", 70), meta("c", 5, 1), meta("big", 100), meta("d", 20), meta("e", 64)]
    model += [meta("more", 300), meta("last", 101)]
    assert plan(model, buffer_bytes=200, pack_below=100) == [
        Chunk(0, True, (ChunkItem(0, 0, 10), ChunkItem(1, 64, 70)), ((0, 1), (1, 2)), 134),
        Chunk(1, True, (ChunkItem(2, 0, 5),), ((0, 1),), 5),
        Chunk(0, True, (ChunkItem(4, 0, 20), ChunkItem(5, 64, 64)), ((0, 1), (1, 2)), 128),
        Chunk(0, False, (ChunkItem(3, 0, 100), ChunkItem(6, 100, 300)), ((0, 1), (1, 2)), 400),
        Chunk(0, False, (ChunkItem(7, 0, 101),), ((0, 1),), 101),
    ]


def test_what_is_alike_and_lies_end_to_end_is_one_run() -> None:
    shapes = [(32,), (32,), (32, 1), (33,), (33,), (32,)]
    model = [ParamMeta(str(number), torch.bfloat16, shape) for number, shape in enumerate(shapes)]
    (chunk,) = plan(model, buffer_bytes=1000)
    assert chunk.runs == ((0, 2), (2, 3), (3, 4), (4, 5), (5, 6))


def test_packs_are_short_enough_to_go_side_by_side() -> None:
    model = [ParamMeta(str(number), torch.uint8, (1 << 19,)) for number in range(20)]
    chunks = plan(model, buffer_bytes=16 << 20)
    assert [len(chunk.items) for chunk in chunks] == [8, 8, 4]
    assert [name for chunk in chunks for name in chunk.names] == [meta.name for meta in model]


@pytest.mark.parametrize(
    "wrong",
    [
        {"buffer_bytes": 0},
        {"buffer_bytes": 10, "pack_below": 11},
        {"buffer_bytes": 10, "pack_below": -1},
        {"buffer_bytes": 10, "align": 0},
        {"buffer_bytes": 10, "align": 48},
    ],
    ids=str,
)
def test_plans_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        plan([], **wrong)


def test_the_digest_tells_plans_apart() -> None:
    model = [ParamMeta(name, torch.bfloat16, (100,)) for name in "abc"]
    digests = {
        plan_digest(plan(model, buffer_bytes=1000)),
        plan_digest(plan(model, buffer_bytes=500)),
        plan_digest(plan(model, buffer_bytes=1000, align=512)),
        plan_digest(plan(model, buffer_bytes=1000, packed=False)),
        plan_digest(plan(model[:2], buffer_bytes=1000)),
    }
    assert len(digests) == 5


def random_tensor(meta: ParamMeta) -> torch.Tensor:
    raw = torch.randint(0, 2 if meta.dtype == torch.bool else 256, (meta.nbytes,), dtype=torch.uint8)
    return raw.view(meta.dtype).view(meta.shape)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


@given(model=models(), buffer_bytes=st.integers(1, 3000))
def test_chunks_round_trip(model: list[ParamMeta], buffer_bytes: int) -> None:
    tensors = {index: random_tensor(meta) for index, meta in enumerate(model)}
    received: dict[str, torch.Tensor] = {}
    for chunk in plan(model, buffer_bytes=buffer_bytes):
        slot = BufferRing(1, max(chunk.nbytes, 1), "cpu").acquire(Deadline(1))
        message = fill_chunk(slot.buffer, chunk, tensors)
        assert message.numel() == chunk.nbytes
        received |= {name: view.clone() for name, view in chunk_views(message.clone(), chunk, model)}
    assert all(same_bytes(received[meta.name], tensors[index]) for index, meta in enumerate(model))


@given(model=models(), buffer_bytes=st.integers(1, 3000), apart=st.sets(st.integers(0, 11)), gaps=st.booleans())
def test_unpacking_to_targets(model: list[ParamMeta], buffer_bytes: int, apart: set[int], gaps: bool) -> None:
    """Whatever lies end to end is copied, the rest is handed out, and nothing beyond the targets is written."""
    tensors = {index: random_tensor(meta) for index, meta in enumerate(model)}
    arena = torch.full((sum(-(-meta.nbytes // 64) * 64 + 64 for meta in model) + 64,), 77, dtype=torch.uint8)
    start = -arena.data_ptr() % 64
    targets, covered = {}, torch.zeros_like(arena, dtype=torch.bool)
    for index, meta in enumerate(model):
        start += 64 * (index in apart)
        targets[meta.name] = arena[start : start + meta.nbytes].view(meta.dtype).view(meta.shape)
        covered[start : start + meta.nbytes] = True
        start += -(-meta.nbytes // 64) * 64 if gaps else -(-meta.nbytes // 16) * 16
    for index in apart & {0, 5}:
        targets.pop(f"p{index}", None)
    for chunk in plan(model, buffer_bytes=buffer_bytes):
        buffer = BufferRing(1, max(chunk.nbytes, 1), "cpu").acquire(Deadline(1)).buffer
        message = fill_chunk(buffer, chunk, tensors)
        copied, views = unpack_chunk(message, chunk, model, targets)
        assert sorted([*copied, *(name for name, _ in views)]) == sorted(model[item.index].name for item in chunk.items)
        assert all(same_bytes(view, tensors[int(name[1:])]) for name, view in views)
        assert all(same_bytes(targets[name], tensors[int(name[1:])]) for name in copied)
    assert (arena[~covered] == 77).all()


def test_thousands_side_by_side_are_copied() -> None:
    model = [ParamMeta(f"p{number}", torch.bfloat16, (32,)) for number in range(5000)]
    slab = staging.Slab()
    targets = {meta.name: staging.storage_bytes(slab.cut(64)).view(torch.bfloat16) for meta in model}
    (chunk,) = plan(model, buffer_bytes=1 << 20)
    tensors = {index: random_tensor(meta) for index, meta in enumerate(model)}
    message = fill_chunk(torch.empty(1 << 20, dtype=torch.uint8), chunk, tensors)
    assert unpack_chunk(message, chunk, model, targets) == (list(targets), [])
    assert all(same_bytes(targets[f"p{index}"], tensor) for index, tensor in tensors.items())


class Flight:
    """Bytes on their way that arrive when told so."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.done = False
        self.waits = 0
        self._error = error

    def wait(self, deadline: Deadline) -> None:
        self.waits += 1
        if self._error is not None:
            raise self._error
        self.done = True


def test_ring_memory_is_fixed_and_used_again() -> None:
    ring = BufferRing(2, 1000, "cpu")
    assert ring.allocated_bytes == 0
    seen = set()
    for _ in range(10):
        slot = ring.acquire(Deadline(1))
        assert slot.buffer.data_ptr() % ALIGNMENT == 0
        assert (slot.buffer.numel(), slot.buffer.dtype) == (1000, torch.uint8)
        seen.add(slot.buffer.data_ptr())
        slot.release()
    assert len(seen) == 1
    assert ring.allocated_bytes == 1000
    assert ring.nbytes == 2000


def test_a_slot_is_free_when_its_bytes_have_left() -> None:
    ring = BufferRing(2, 8, "cpu")
    first, second = Flight(), Flight()
    one, other = ring.acquire(Deadline(1)), ring.acquire(Deadline(1))
    one.release(after=first)
    other.release(after=second)
    assert ring.try_acquire() is None
    again = ring.acquire(Deadline(1))
    assert again.buffer is one.buffer
    assert (first.waits, second.waits) == (1, 0)
    second.done = True
    last = ring.try_acquire()
    assert last is not None
    assert last.buffer is other.buffer


def test_a_slot_released_twice_is_free_once() -> None:
    ring = BufferRing(2, 8, "cpu")
    slot = ring.acquire(Deadline(1))
    slot.release()
    slot.release()
    assert ring.acquire(Deadline(1)).buffer is not ring.acquire(Deadline(1)).buffer


def test_a_full_ring_waits_for_the_deadline_or_a_release() -> None:
    ring = BufferRing(1, 8, "cpu")
    slot = ring.acquire(Deadline(1))
    with pytest.raises(DeadlineExceeded, match="a free buffer"):
        ring.acquire(Deadline(0.05))
    releasing = threading.Thread(target=slot.release)
    releasing.start()
    assert ring.acquire(Deadline(5)).buffer is slot.buffer
    releasing.join()


def test_a_failed_flight_is_told_and_its_buffer_never_used_again() -> None:
    ring = BufferRing(1, 8, "cpu")
    slot = ring.acquire(Deadline(1))
    slot.release(after=Flight(error=ConnectionError("lost")))
    with pytest.raises(ConnectionError, match="lost"):
        ring.acquire(Deadline(1))
    ring.retire()
    slot.release()
    assert ring.acquire(Deadline(1)).buffer.data_ptr() != slot.buffer.data_ptr()


@pytest.mark.parametrize(("count", "nbytes"), [(0, 1), (1, 0)])
def test_rings_that_cannot_be(count: int, nbytes: int) -> None:
    with pytest.raises(ValueError):
        BufferRing(count, nbytes, "cpu")
