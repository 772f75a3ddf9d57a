"""Arithmetic of the transport: where parameters lie, which copies that takes, what goes through which slot."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from weightwire.errors import HandshakeError
from weightwire.layout import ParamMeta
from weightwire.packing import fill_chunk, unpack_chunk
from weightwire_ipc.copying import bytes_at, spans
from weightwire_ipc.ring import Fill, plan_fills
from weightwire_ipc.table import RING, Layout, check_table, compact, locate

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


def meta(place: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> ParamMeta:
    return ParamMeta(f"parameter {place}", dtype, (nbytes // dtype.itemsize,))


@st.composite
def scattered(draw: st.DrawFn) -> tuple[list[ParamMeta], list[int], list[tuple[int, int]]]:
    """Parameters, their addresses, and segments: inside, outside, over the edge, over each other, empty."""
    segments, start = [], 1 << 20
    for _ in range(draw(st.integers(0, 3))):
        start += 64 * draw(st.integers(0, 4))
        nbytes = 64 * draw(st.integers(0, 8))
        segments.append((start, nbytes))
        start += nbytes
    metas, pointers = [], []
    for place in range(draw(st.integers(0, 8))):
        dtype = draw(st.sampled_from(DTYPES))
        metas.append(meta(place, dtype.itemsize * draw(st.integers(0, 20)), dtype))
        pointers.append((1 << 20) + 8 * draw(st.integers(-4, 200)))
    return metas, pointers, segments


@given(scattered())
def test_what_is_located_is_accepted_and_is_where_it_says(
    case: tuple[list[ParamMeta], list[int], list[tuple[int, int]]],
) -> None:
    metas, pointers, segments = case
    table = locate(pointers, torch.tensor([one.nbytes for one in metas], dtype=torch.int64), segments)
    check_table(table, metas, {number: nbytes for number, (_, nbytes) in enumerate(segments)})
    taken: set[int] = set()
    for (number, offset), one, pointer in zip(table.tolist(), metas, pointers, strict=True):
        inside = [
            start <= pointer and pointer + one.nbytes <= start + nbytes and one.nbytes > 0 for start, nbytes in segments
        ]
        if number != RING:
            assert inside[number]
            assert segments[number][0] + offset == pointer
            bytes_of = set(range(pointer, pointer + one.nbytes))
            assert not taken & bytes_of
            taken |= bytes_of
        elif any(inside):
            # It goes through the ring for no other reason than that something else lies there.
            others = [other for other in zip(metas, pointers, strict=True) if other != (one, pointer)]
            assert any(at < pointer + one.nbytes and pointer < at + other.nbytes for other, at in others)


METAS = [meta(0, 64, torch.float32), meta(1, 16, torch.bfloat16), meta(2, 0), meta(3, 8, torch.float64)]
GOOD = [[0, 0], [0, 64], [-1, -1], [1, 8]]
SEGMENTS = {0: 80, 1: 64}
FAR = (1 << 63) - 1


def test_a_good_table_is_accepted() -> None:
    check_table(torch.tensor(GOOD), METAS, SEGMENTS)
    check_table(torch.tensor([[-1, -1]] * 4), METAS, {})


@pytest.mark.parametrize(
    ("row", "place", "words"),
    [
        (0, [0, 20], "outside"),
        (0, [0, 80], "outside"),
        (0, [0, 1 << 40], "outside"),
        (0, [0, -4], "outside"),
        (0, [0, -(1 << 63)], "outside"),
        (0, [0, FAR], "outside"),
        (0, [0, FAR - 3], "outside"),
        (0, [0, FAR - 63], "outside"),
        (0, [1, 1], "aligned|outside"),
        (1, [0, 65], "aligned|outside"),
        (1, [1, 3], "aligned"),
        (1, [0, 62], "overlaps"),
        (1, [0, 0], "overlaps"),
        (3, [0, 0], "overlaps"),
        (3, [0, 24], "overlaps"),
        (0, [2, 0], "no segment"),
        (0, [-2, 0], "no segment"),
        (0, [FAR, 0], "no segment"),
        (0, [-1, 0], "no segment"),
        (2, [-1, 5], "no segment"),
        (2, [0, 81], "outside"),
        (2, [5, 0], "no segment"),
    ],
)
def test_a_hostile_row_is_refused_by_name(row: int, place: list[int], words: str) -> None:
    table = torch.tensor(GOOD)
    table[row] = torch.tensor(place)
    with pytest.raises(HandshakeError, match=words) as caught:
        check_table(table, METAS, SEGMENTS)
    assert caught.value.parameter is not None
    assert caught.value.parameter in str(caught.value)
    if "overlaps" not in words:
        assert caught.value.parameter == METAS[row].name


@pytest.mark.parametrize(
    "table",
    [
        torch.tensor(GOOD[:3]),
        torch.tensor([*GOOD, [-1, -1]]),
        torch.tensor(GOOD).reshape(-1),
        torch.tensor(GOOD).to(torch.int32),
        torch.tensor(GOOD).reshape(2, 4),
    ],
)
def test_a_table_of_another_shape_is_refused(table: torch.Tensor) -> None:
    with pytest.raises(HandshakeError, match="table of shape"):
        check_table(table, METAS, SEGMENTS)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.sampled_from([1, 8, 64]), st.data())
def test_a_layout_names_what_lies_where(sizes: list[int], align: int, data: st.DataObject) -> None:
    metas = [meta(place, nbytes) for place, nbytes in enumerate(sizes)]
    layout = Layout(metas, align=align)
    rows = list(zip(layout.offsets, sizes, (one.name for one in metas), strict=True))
    assert all(offset % align == 0 and offset + size <= layout.nbytes for offset, size, _ in rows)
    assert layout.nbytes < sum(sizes) + align * len(sizes)
    owners = {byte: name for offset, size, name in rows for byte in range(offset, offset + size)}
    assert len(owners) == sum(sizes)
    if owners:
        asked = data.draw(st.lists(st.sampled_from(sorted(owners)), max_size=5))
        assert layout.names_at(asked) == list(dict.fromkeys(owners[byte] for byte in asked))
    page = data.draw(st.sampled_from([16, 64, 256]))
    pages = sorted(data.draw(st.sets(st.integers(0, max(0, layout.nbytes - 1) // page), max_size=5)))
    there = {owners[byte] for number in pages for byte in range(number * page, (number + 1) * page) if byte in owners}
    found = layout.names_in(pages, page)
    assert len(found) == len(set(found))
    assert there <= set(found)
    # What has no byte there itself ends right before.
    assert all(
        any(offset <= (number + 1) * page and offset + size + align >= number * page for number in pages)
        for offset, size, name in rows
        if name in found
    )


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    """Blocks of bytes laid out in random order, on both sides, with gaps; and the padding that may go along."""
    sizes = draw(st.lists(st.integers(0, 9), max_size=8))
    padding = draw(st.sampled_from([0, 1, 3, 7]))

    def laid_out(order: Sequence[int]) -> list[int]:
        at, places = 0, [0] * len(sizes)
        for index in order:
            at += draw(st.integers(0, 4))
            places[index] = at
            at += sizes[index]
        return places

    order = range(len(sizes)) if draw(st.booleans()) else draw(st.permutations(range(len(sizes))))
    return laid_out(order), laid_out(order if draw(st.booleans()) else range(len(sizes))), sizes, padding


@given(copies())
def test_copies_bring_every_byte_and_touch_no_others(case: tuple[list[int], list[int], list[int], int]) -> None:
    targets, sources, sizes, padding = case
    room = sum(sizes) + 5 * len(sizes) + 1
    source = bytes(random.Random(room).randbytes(room))
    expected: dict[int, int] = {}
    for target, start, size in zip(targets, sources, sizes, strict=True):
        expected |= {target + byte: source[start + byte] for byte in range(size)}
    written: dict[int, int] = {}
    found = spans(targets, sources, sizes, padding=padding)
    for target, start, size in found:
        assert size > 0
        assert start + size <= room
        for byte in range(size):
            assert target + byte not in written
            written[target + byte] = source[start + byte]
    assert {at: written.get(at) for at in expected} == expected
    assert len(found) <= sum(size > 0 for size in sizes)
    # What is copied along lies between two neighbours, and is no more than the padding.
    strays = sorted(written.keys() - expected.keys())
    assert padding or not strays
    run = 0
    for at, before in zip(strays, [None, *strays], strict=False):
        run = run + 1 if before == at - 1 else 1
        assert run <= padding


def test_neighbours_are_copied_by_one_call() -> None:
    assert spans([0, 10, 20], [100, 110, 120], [10, 10, 10]) == [(0, 100, 30)]
    assert spans([0, 12, 24], [100, 112, 124], [10, 10, 10], padding=2) == [(0, 100, 34)]
    assert len(spans([0, 12], [100, 112], [10, 10], padding=1)) == 2
    assert spans([], [], []) == []
    assert spans([5, 5], [7, 7], [0, 0]) == []


SLOT = 1 << 12
SIZES = (0, 1, 7, 63, 64, 65, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT, (1 << 18) + 1)


@given(
    st.lists(st.sampled_from(SIZES) | st.integers(0, 200), max_size=12),
    st.sampled_from([1, 64, 100, 1000, SLOT, 1 << 18]),
)
@example([4096, 0, 4096], 4096)
def test_every_byte_goes_through_the_ring_once_and_in_order(sizes: list[int], slot_bytes: int) -> None:
    sizes = [size % (100 * slot_bytes) for size in sizes]
    metas = [meta(place, nbytes) for place, nbytes in enumerate(sizes)]
    fills = plan_fills(metas, slot_bytes)
    came = [0] * len(metas)
    completed: list[int] = []
    for fill in fills:
        assert 0 <= fill.nbytes <= slot_bytes
        used: set[int] = set()
        for row, start, offset, nbytes in parts(fill):
            assert start == came[row]
            assert offset + nbytes <= fill.nbytes
            assert used.isdisjoint(range(offset, offset + nbytes))
            used |= set(range(offset, offset + nbytes)) if nbytes < 1 << 14 else {offset}
            came[row] += nbytes
        completed += fill.completes
        assert fill.last == max(row for row, _, _, _ in parts(fill))
        assert all(came[row] == sizes[row] for row in fill.completes)
        assert all(row in fill.completes for row, *_ in parts(fill) if came[row] == sizes[row])
    assert came == sizes
    assert sorted(completed) == list(range(len(metas)))
    lasts = [fill.last for fill in fills]
    assert lasts == sorted(lasts)


def parts(fill: Fill) -> list[tuple[int, int, int, int]]:
    """Row, start in it, offset in the slot, bytes."""
    if fill.pack is not None:
        return [(item.index, 0, item.offset, item.nbytes) for item in fill.pack.items]
    return [(piece.row, piece.start, piece.offset, piece.nbytes) for piece in fill.pieces]


def test_a_slot_that_ends_in_the_midst_of_an_element() -> None:
    metas = [meta(0, 800, torch.float64), meta(1, 24, torch.float64)]
    fills = plan_fills(metas, 100)
    assert [fill.nbytes for fill in fills if fill.pack is None] == [100] * 8
    assert sum(nbytes for fill in fills for _, _, _, nbytes in parts(fill)) == 824


def test_a_pack_is_read_as_it_was_written() -> None:
    metas = [meta(0, 20, torch.float32), meta(1, 0), meta(2, 6, torch.bfloat16)]
    tensors = [torch.arange(5.0), torch.empty(0, dtype=torch.uint8), torch.ones(3, dtype=torch.bfloat16)]
    (fill,) = plan_fills(metas, SLOT)
    assert fill.pack is not None
    slot = torch.zeros(SLOT, dtype=torch.uint8)
    fill_chunk(slot, fill.pack, dict(enumerate(tensors)))
    _, views = unpack_chunk(slot, fill.pack, metas, {})
    assert all(torch.equal(view, tensors[place]) for place, (_, view) in enumerate(views))


def test_memory_by_address_keeps_its_bytes() -> None:
    tensor = torch.arange(6, dtype=torch.uint8)
    assert torch.equal(bytes_at(tensor.data_ptr() + 2, 3), tensor[2:5])


@given(st.lists(st.integers(-1, 4), max_size=6))
def test_segments_that_nothing_lies_in_are_left_out(numbers: list[int]) -> None:
    table = torch.tensor([[number, 64 * place] for place, number in enumerate(numbers)], dtype=torch.int64).view(-1, 2)
    found, used = compact(table)
    assert used == sorted(set(numbers) - {RING})
    assert torch.equal(found[:, 1], table[:, 1])
    assert [RING if number == RING else used[number] for number in found[:, 0].tolist()] == numbers
