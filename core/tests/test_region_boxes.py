from __future__ import annotations

import itertools
import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightwire.region import Region
from weightwire.region_boxes import (
    check_region,
    digits,
    intersect,
    merge_axes,
    row_major,
    select,
    span,
    whole,
)

randoms = st.randoms(use_true_random=False)


def elements(region: Region, memory: Tensor) -> list[int]:
    """What a region reads of a flat tensor, in order."""
    return list(map(int, memory.as_strided(region.sizes, region.strides, region.offset).flatten()))


def region_of(view: Tensor) -> Region:
    return Region(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))


def view_once(random: Random, view: Tensor) -> Tensor:
    """One more view operation, of any kind that torch has."""
    kind = random.choice(["slice", "select", "permute", "split", "flatten", "window", "expand", "none"])
    if not view.dim():
        return view.unsqueeze(0)
    dim = random.randrange(view.dim())
    size = view.shape[dim]
    if kind == "slice":
        low = random.randint(0, size)
        return view[(slice(None),) * dim + (slice(low, random.randint(low, size), random.randint(1, 3)),)]
    if kind == "select" and size:
        return view.select(dim, random.randrange(size))
    if kind == "permute":
        return view.permute(random.sample(range(view.dim()), view.dim()))
    if kind == "split" and view.numel():
        inner = random.choice([n for n in range(1, size + 1) if size % n == 0])
        return view.view(*view.shape[:dim], -1, inner, *view.shape[dim + 1 :])
    if kind == "flatten":
        last = random.randrange(dim, view.dim())
        try:
            return view.view(*view.shape[:dim], -1, *view.shape[last + 1 :])
        except RuntimeError:
            return view
    if kind == "window" and size:
        return view.unfold(dim, random.randint(1, min(3, size)), random.randint(1, 2))
    return view.unsqueeze(dim).expand(*view.shape[:dim], 2, *view.shape[dim:]) if kind == "expand" else view


def random_box(random: Random, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    bounds = [sorted((random.randint(0, size), random.randint(0, size))) for size in shape]
    return tuple(low for low, _ in bounds), tuple(high for _, high in bounds)


def random_scene(random: Random) -> tuple[tuple[int, ...], Region, tuple[int, ...], tuple[int, ...]]:
    """A tensor's shape, a view chain's region of it, and a box."""
    shape = tuple(random.randint(1, 7) for _ in range(random.randint(0, 4)))
    view = torch.empty(shape, device="meta")
    for _ in range(random.randint(0, 5)):
        changed = view_once(random, view)
        view = changed if changed.numel() <= 300 else view
    return shape, region_of(view), *random_box(random, shape)


def check_intersection(shape: tuple[int, ...], region: Region, start: tuple[int, ...], stop: tuple[int, ...]) -> int:
    """Hold `intersect` against torch; returns the number of pieces."""
    memory = torch.arange(math.prod(shape))
    box = memory.reshape(shape)[tuple(map(slice, start, stop))].flatten().clone()
    inside = set(map(int, box))
    reads = elements(region, memory) if region.numel else []
    expected = [position for position, element in enumerate(reads) if element in inside]
    pieces = intersect(region, shape, start, stop)
    positions: list[int] = []
    for piece in pieces:
        assert piece.source.sizes == piece.local.sizes == piece.target.sizes
        part = elements(piece.target, torch.arange(region.numel))
        assert part
        assert elements(piece.source, memory) == elements(piece.local, box) == [reads[at] for at in part]
        assert elements(select(region, piece.target), memory) == elements(piece.source, memory)
        positions += part
    assert sorted(positions) == expected
    return len(pieces)


@given(randoms)
def test_intersection_is_what_torch_reads(random: Random) -> None:
    check_intersection(*random_scene(random))


def random_strides(random: Random) -> tuple[tuple[int, ...], Region, tuple[int, ...], tuple[int, ...]]:
    """A region that no view chain makes."""
    shape = tuple(random.randint(1, 6) for _ in range(random.randint(1, 3)))
    numel = math.prod(shape)
    region = Region(0, (), ())
    for _ in range(3):  # as many axes as fit into the tensor
        size, stride = random.randint(1, 5), random.randint(0, 40)
        longer = Region(0, (*region.sizes, size), (*region.strides, stride))
        region = longer if span(longer)[1] <= numel else region
    offset = random.randint(0, numel - span(region)[1])
    return shape, Region(offset, region.sizes, region.strides), *random_box(random, shape)


@given(randoms)
def test_any_strides_at_all(random: Random) -> None:
    check_intersection(*random_strides(random))


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_intersection_often() -> None:
    random = Random(7)
    for _ in range(20_000):
        check_intersection(*random_scene(random))
        check_intersection(*random_strides(random))


def test_boxes_partition_a_region() -> None:
    region = Region(3, (4, 2, 5), (1, 60, 12))
    shape = (2, 5, 12)
    found = []
    for rows, columns in itertools.product([(0, 1), (1, 2)], [(0, 5), (5, 9), (9, 12)]):
        pieces = intersect(region, shape, (rows[0], 0, columns[0]), (rows[1], 5, columns[1]))
        found += [at for piece in pieces for at in elements(piece.target, torch.arange(region.numel))]
    assert sorted(found) == list(range(region.numel))


def test_fused_heads_stay_one_piece() -> None:
    """Queries of interleaved heads, transposed: two digits on one dimension, and a box that cuts the other."""
    view = torch.empty(4 * 3 * 8, 32, device="meta").view(4, 3, 8, 32)[:, 1].permute(2, 0, 1)
    assert len(intersect(region_of(view), (96, 32), (0, 8), (96, 16))) == 1
    assert len(intersect(region_of(view), (96, 32), (12, 0), (60, 32))) == 3


def test_flat_range_is_head_body_and_tail() -> None:
    pieces = intersect(Region(5, (10_000_000,), (1,)), (4000, 50, 60), (0, 0, 0), (4000, 50, 60))
    assert len(pieces) <= 5
    assert sum(piece.source.numel for piece in pieces) == 10_000_000


def test_what_does_not_decompose_is_exact() -> None:
    diagonal = region_of(torch.empty(6, 6, device="meta").diagonal())
    assert check_intersection((6, 6), diagonal, (1, 0), (5, 4)) == 3


def test_no_dimensions() -> None:
    (piece,) = intersect(whole(()), (), (), ())
    assert piece.source == piece.local == piece.target == Region(0, (), ())
    (piece,) = intersect(Region(0, (3,), (0,)), (), (), ())
    assert piece.local == Region(0, (3,), (0,))
    assert intersect(Region(0, (0, 3), (3, 1)), (0, 3), (0, 0), (0, 3)) == []


@given(randoms)
def test_merged_axes_walk_the_same_pairs(random: Random) -> None:
    shape, region, _, _ = random_scene(random)
    memory = torch.arange(max(math.prod(shape), 1))
    sizes, strides, index = merge_axes(region.sizes, region.strides, row_major(region.sizes))
    assert 1 not in sizes
    assert elements(Region(region.offset, sizes, strides), memory) == elements(region, memory)
    if region.numel:
        assert elements(Region(0, sizes, index), torch.arange(region.numel)) == list(range(region.numel))
        assert merge_axes(sizes, strides, index) == (sizes, strides, index)


def test_paired_target_is_composed() -> None:
    source = Region(0, (6, 4), (4, 1))
    target = Region(100, (6, 4), (1, 10))
    (piece,) = intersect(source, (6, 4), (2, 1), (5, 3), target)
    assert piece.target == Region(100 + 2 + 10, (3, 2), (1, 10))
    assert piece.local == Region(0, (3, 2), (2, 1))


def test_whole_and_row_major() -> None:
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major(()) == ()
    assert digits(whole((2, 3)), (2, 3)) == ((0, 1, 2, 0, 1), (1, 1, 3, 1, 1))


@pytest.mark.parametrize(
    "region",
    [Region(0, (5,), (1,)), Region(-1, (1,), (1,)), Region(0, (2, 2), (3, 1)), Region(0, (2,), (-1,)),
     Region(0, (2,), (1, 1)), Region(0, (-1,), (1,))],
)  # fmt: skip
def test_outside_is_refused(region: Region) -> None:
    with pytest.raises(ValueError, match="does not lie in a tensor of 4 elements"):
        check_region(region, 4)


def test_inside_is_not_refused() -> None:
    for region in (whole((4,)), Region(9, (0,), (1,)), Region(3, (), ()), Region(3, (7,), (0,))):
        check_region(region, 4)
