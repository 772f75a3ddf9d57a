"""Sinks that are patched hold what loading the patched checkpoint gives, bit for bit, and it costs what is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.tests.patch_scenes import Touched, Twice, patched, random_patches
from core.tests.recording_models import Pairs, module
from core.tests.region_models import Loading
from core.tests.sharded_models import Served, policy_tensors
from core.tests.sink_models import (
    DTYPES,
    KINDS,
    Zoo,
    content,
    metadata,
    push,
    same_bits,
    spec_of,
    targets_of,
)
from weightwire import staging
from weightwire.loader_sink import LoaderSink
from weightwire.module_sink import ModuleSink
from weightwire.sink import Patch, WeightSink


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with mock.patch.object(staging, "POISON", True):
        yield


STEPS = st.tuples(
    st.sampled_from(("patch", "patch", "patch", "abort", "broken", "refused", "full", "partial", "retire")),
    st.integers(0, 1 << 12),
)
histories = st.lists(STEPS, min_size=1, max_size=6)
options = st.fixed_dictionaries(
    {"staging": st.sampled_from(("staged", "in_place")), "commit": st.sampled_from(("swap", "copy"))}
)
WIDE = (*DTYPES, torch.float64, torch.complex128, torch.int8, torch.float8_e5m2)


def everything(model: nn.Module, state: int) -> dict[str, Tensor]:
    return {name: content(name, like, state) for name, like in targets_of(model).items()}


def run(twice: Twice, steps: list[tuple[str, int]]) -> None:
    for action, seed in (*steps, ("full", 1), ("patch", 3), ("full", 2), ("patch", 5)):
        in_place = twice.patched.staging == "in_place" and action == "retire"
        twice.step("abort" if in_place else action, seed)


# Plain modules


def check_module(kinds: list[str], dtype: torch.dtype, options: dict[str, Any], steps: list[tuple[str, int]]) -> None:
    run(Twice(lambda: Zoo(kinds, dtype), everything, ModuleSink, **options), steps)


modules = given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4), st.sampled_from(WIDE), options, histories)
test_a_module_that_is_patched = settings(max_examples=30)(modules(check_module))
test_a_module_that_is_patched_often = pytest.mark.thorough(
    pytest.mark.timeout(300)(settings(max_examples=1500)(modules(check_module)))
)


def test_every_kind_and_dtype() -> None:
    for dtype in WIDE:
        run(Twice(lambda dtype=dtype: Zoo(KINDS, dtype), everything, ModuleSink), [("patch", 7), ("broken", 1)])  # type: ignore[misc]


def test_a_patch_lands_in_what_is_staged_even_if_somebody_holds_the_live_storage() -> None:
    model: Any = Zoo(["flat"])
    sink, part = ModuleSink(model), model.parts[0]
    push(sink, everything(model, 1))
    held = part.first.detach()
    new = everything(model, 2)
    sink.begin(spec_of({name: new[name] for name in ("parts.0.first", "parts.0.second")}, "partial"))
    sink.load([("parts.0.first", new["parts.0.first"])])
    sink.patch([Patch("parts.0.second", torch.tensor([2]), new["parts.0.second"][2:3])])
    sink.prepare()
    assert sink.commit().copied_because == {"views held elsewhere": 2}
    assert same_bits(held, new["parts.0.first"])
    assert same_bits(part.second[2:3], new["parts.0.second"][2:3])


# Models with a loader of their own

RECORDED = ("Fused", "Experts", "Vocabulary", "Odd")


def numbered(model: Loading, state: int) -> dict[str, Tensor]:
    return model.checkpoint(state)


def check_loader(kinds: list[str], options: dict[str, Any], steps: list[tuple[str, int]]) -> None:
    run(Twice(lambda: Loading(kinds), numbered, LoaderSink, **options), steps)


loaders = given(st.lists(st.sampled_from(RECORDED), min_size=1, max_size=3), options, histories)
test_a_loader_that_is_patched = settings(max_examples=25)(loaders(check_loader))
test_a_loader_that_is_patched_often = pytest.mark.thorough(
    pytest.mark.timeout(300)(settings(max_examples=1000)(loaders(check_loader)))
)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_a_tensor_parallel_server_that_is_patched(rank: int, ranks: int) -> None:
    def checkpoint(model: Served, state: int) -> dict[str, Tensor]:
        return {name: content(name, one, state) for name, one in policy_tensors(0).items()}

    twice = Twice(lambda: Served(rank, ranks), checkpoint, LoaderSink)
    run(twice, [("patch", seed) for seed in range(10, 16)])
    assert twice.patched.load_plan(metadata(twice.tensors)).opaque == ()


def test_the_twin_knows_what_was_patched() -> None:
    """A loader that leaves something alone finds what serves."""
    twice = Twice(lambda: Loading(["Fused", "Odd"]), numbered, LoaderSink)
    for seed in range(1, 8):
        twice.step("patch", seed)
        twice.step("partial", 2 * seed)


# What it costs

Scene = tuple[nn.Module, WeightSink, dict[str, Tensor]]


def touched_elements(make: Callable[[int], Scene], rows: int) -> int:
    """Elements that an update touches which changes 40 of them."""
    model, sink, tensors = make(rows)
    names = list(tensors)
    positions = torch.arange(20) * (rows // 20) * 3
    patches = [Patch(name, positions, torch.ones(20)) for name in names[:2]]
    assert sink.unpatchable(metadata(tensors)) is None
    with Touched() as touched:
        sink.begin(spec_of(tensors))
        sink.patch(patches)
        sink.abort(retire=True)
        patched(sink, patches, tensors)
    assert sum(int(one.sum()) for one in model.parameters()) == 40
    return int(touched.count)


def plain(rows: int) -> Scene:
    tensors = {"one": torch.zeros(rows, 8), "two": torch.zeros(8, rows), "three": torch.zeros(rows)}
    model = module(one=torch.zeros(rows, 8), two=torch.zeros(rows, 8).t(), three=torch.zeros(rows))
    return model, ModuleSink(model), tensors


def loading(rows: int) -> Scene:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Parameter(torch.zeros(2, 8, rows))

        def load_weights(self, pairs: Pairs) -> None:
            for name, tensor in pairs:
                self.both.data[int(name == "two")].copy_(tensor.t())

    model = Stacked()
    return model, LoaderSink(model), {"one": torch.zeros(rows, 8), "two": torch.zeros(rows, 8)}


@pytest.mark.parametrize("make", [plain, loading])
def test_it_costs_what_is_changed(make: Callable[[int], Scene]) -> None:
    few, many = touched_elements(make, 1000), touched_elements(make, 8000)
    assert few == many, "elements, not those of the model"
    assert 40 < few < 40 * 60


def test_random_patches_cover_both_models() -> None:
    """The scenes do patch: otherwise all of this compares nothing."""
    model = Loading(list(RECORDED))
    assert sum(len(random_patches(model.checkpoint(1), seed)[0]) for seed in range(10)) > 50


# Modes of torch


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_inference_mode(made: bool, called: bool) -> None:
    with torch.inference_mode(made):
        models = [Zoo(KINDS), Zoo(KINDS)]
    twice = Twice(models.pop, everything, ModuleSink)
    for mode in (called, False):
        with torch.inference_mode(mode):
            for action, seed in (("patch", 1), ("broken", 1), ("patch", 2), ("full", 3)):
                twice.step(action, seed)


@pytest.mark.parametrize("called", [False, True])
def test_inference_mode_with_a_loader(called: bool) -> None:
    """A loader that writes into what was made in inference mode has to be called in it."""
    twice = Twice(lambda: Loading(list(RECORDED)), numbered, LoaderSink)
    with torch.inference_mode():
        in_it = Twice(lambda: Loading(list(RECORDED)), numbered, LoaderSink)
        run(in_it, [("patch", 1), ("broken", 2)])
    with torch.inference_mode(called):
        run(twice, [("patch", 1), ("broken", 2)])
        in_it.held(4)
        in_it.patched.prepare()
        in_it.patched.commit()
