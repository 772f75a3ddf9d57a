"""Patches through the copies of a load plan: the same as copying the patched tensor, in the time that a patch takes."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.tests.patch_scenes import bits_of, boxes_of, change, random_patches
from core.tests.region_models import part
from core.tests.sink_models import content, same_bits
from core.tests.test_recording_views import TARGETS, VIEWS, chains, run
from weightwire.errors import UpdateRefused
from weightwire.layout import Box, ParamMeta
from weightwire.load_plan import Copy, normal_pair
from weightwire.patching import HeldPatches, apply_all, check_patch, undo_all
from weightwire.plan_patching import PatchRoutes
from weightwire.region import Region
from weightwire.sink import Patch
from weightwire.testing.strategies import DTYPES

SIDES = st.lists(st.sampled_from((1, 2, 3, 4, 6)), max_size=4).map(tuple)


def region_of(view: Tensor) -> Region:
    return Region(int(view.storage_offset()), tuple(view.shape), view.stride())


def permuted(shape: tuple[int, ...], draw: random.Random) -> Region:
    """Some region of these extents that names no element twice: permuted, with gaps."""
    order = draw.sample(range(len(shape)), len(shape))
    strides, step = [0] * len(shape), draw.choice((1, 2))
    for axis in order:
        strides[axis] = step
        step *= shape[axis] + draw.choice((0, 1))
    return Region(draw.randrange(3), shape, tuple(strides))


@given(st.data(), SIDES, st.sampled_from((*DTYPES, torch.complex128)), st.integers(0, 1 << 20))
def test_patches_land_where_a_copy_does(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    draw, old = random.Random(seed), content("w", torch.empty(shape, dtype=dtype), 1)
    steps = data.draw(chains(shape, tuple(kind for kind in (*TARGETS, *VIEWS) if kind.__name__ != "_bytes"), 5))
    source = region_of(run(torch.arange(old.numel()).view(shape), steps))
    target = permuted(source.sizes, draw)
    first, second = normal_pair(source, target)
    copy = Copy("w", first, "t", second)
    size = target.offset + 1 + sum((n - 1) * s for n, s in zip(target.sizes, target.strides, strict=True) if n)
    flat = content("t", torch.empty(max(size, 1), dtype=dtype), 2)
    if source.numel:
        part(flat, target).copy_(part(old.reshape(-1), source))
    before, wanted, new = flat.clone(), flat.clone(), old.clone()
    patches = [change("w", old, box, draw, new) for box in boxes_of(shape, draw)]
    if source.numel:
        part(wanted, target).copy_(part(new.reshape(-1), source))
    routes = PatchRoutes([copy])
    assert routes.reason is None
    meta = ParamMeta("w", dtype, shape)
    ready = routes.ready([check_patch(patch, meta) for patch in patches], {"t": flat})
    for one in ready:
        one.make_room()
    assert same_bits(flat, before)
    apply_all(ready)
    assert same_bits(flat, wanted)
    undo_all(ready)
    assert same_bits(flat, before)


def test_regions_that_read_an_element_twice_have_no_way() -> None:
    windows = Region(0, (3, 2), (1, 1))
    assert "'w'" in str(PatchRoutes([Copy("w", windows, "t", Region(0, (3, 2), (2, 1)))]).reason)


@pytest.mark.parametrize(
    ("boxes", "overlap"),
    [
        ([((0, 0), (2, 2)), ((2, 0), (4, 2)), ((0, 2), (4, 4))], False),
        ([((0, 0), (2, 2)), ((1, 1), (3, 3))], True),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2)), ((3, 0), (4, 1))], True),
        ([((), ()), ((), ())], True),
        ([((0, 0), (0, 0)), ((0, 0), (4, 4))], False),
    ],
)
def test_boxes_of_one_call_are_disjoint(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], overlap: bool) -> None:
    patches = [Patch("w", None, torch.zeros(1), Box(*box)) for box in boxes]
    held = HeldPatches()
    if not overlap:
        held.add(patches, lambda name: None)
        return
    with pytest.raises(UpdateRefused, match="'w' came twice"):
        held.add(patches, lambda name: None)


def test_the_whole_comes_once() -> None:
    whole = Patch("w", None, torch.zeros(4))
    with pytest.raises(UpdateRefused, match="came twice"):
        HeldPatches().add([whole, Patch("w", torch.tensor([0]), torch.zeros(1), Box((0,), (1,)))], lambda name: None)


def test_random_patches_change_what_they_say() -> None:
    """The generator that all of this rests on."""
    tensors = {"a": content("a", torch.empty(4, 6), 1), "b": content("b", torch.empty(5, dtype=torch.bfloat16), 1)}
    seen = set()
    for seed in range(40):
        patches, new = random_patches(tensors, seed)
        for name, old in tensors.items():
            differs = (bits_of(old) != bits_of(new[name])).any(1).sum()
            assert int(differs) <= sum(patch.values.numel() for patch in patches if patch.name == name)
        seen |= {(patch.positions is None, patch.box is None) for patch in patches}
    assert len(seen) == 4
