"""Updates that land by regions leave every model as plain loading does, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from core.tests import sink_ranks
from core.tests.recording_models import Pairs, module
from core.tests.region_models import LOADERS, OPAQUE, STEPS, Both, Loading, Runner, land, push_by_regions
from core.tests.sink_models import DTYPES, KINDS, Zoo, content, metadata, same_bits, spec_of, targets_of
from core.tests.test_sink_ranks import on_ranks
from weightwire import staging
from weightwire.errors import UpdateRefused
from weightwire.loader_sink import LoaderSink
from weightwire.module_sink import ModuleSink
from weightwire.testing.fixtures import BorrowRanks


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with mock.patch.object(staging, "POISON", True):
        yield


histories = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(1, 7)), min_size=1, max_size=5)


# Plain modules


def everything(model: nn.Module, state: int) -> dict[str, Tensor]:
    return {name: content(name, like, state) for name, like in targets_of(model).items()}


def wider(model: nn.Module, state: int) -> dict[str, Tensor]:
    """Floating point comes as float32."""
    likes = {
        name: torch.empty(like.shape) if like.is_floating_point() else like for name, like in targets_of(model).items()
    }
    return {name: content(name, like, state) for name, like in likes.items()}


def check_module(kinds: list[str], dtype: torch.dtype, options: dict[str, Any], steps: list[tuple[str, int]]) -> None:
    cast = options.get("cast", False)
    both = Both(lambda: Zoo(kinds, dtype), wider if cast else everything, ModuleSink, **options)
    for action, state in (*steps, ("full", 8), ("full", 9)):
        both.step(action, state)


module_options = st.fixed_dictionaries(
    {"staging": st.sampled_from(("staged", "in_place")), "commit": st.sampled_from(("swap", "copy"))},
    optional={"cast": st.just(True)},
)
kinds_of_tensors = st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)
modules = given(kinds_of_tensors, st.sampled_from(DTYPES), module_options, histories)
test_a_module_by_regions_is_a_module_by_load = modules(check_module)
test_a_module_by_regions_often = pytest.mark.thorough(
    pytest.mark.timeout(300)(settings(max_examples=1500)(modules(check_module)))
)


def test_every_kind_of_tensor_by_regions() -> None:
    for dtype in DTYPES:
        check_module(KINDS, dtype, {}, [("full", 1), ("retire", 2), ("partial", 3), ("abort", 4)])


# Modules with a loader of their own


def check_loader(kinds: list[str], options: dict[str, Any], steps: list[tuple[str, int]]) -> None:
    both = Both(lambda: Loading(kinds), Loading.checkpoint, LoaderSink, **options)
    for action, state in (*steps, ("full", 8), ("full", 9)):
        both.step(action, state)


loader_options = st.fixed_dictionaries(
    {"staging": st.sampled_from(("staged", "in_place")), "commit": st.sampled_from(("swap", "copy"))}
)
loaders = given(st.lists(st.sampled_from(LOADERS), min_size=1, max_size=3), loader_options, histories)
test_a_loader_by_regions_is_a_loader_by_load = settings(max_examples=25)(loaders(check_loader))
test_a_loader_by_regions_often = pytest.mark.thorough(
    pytest.mark.timeout(300)(settings(max_examples=1000)(loaders(check_loader)))
)


@pytest.mark.parametrize("kind", LOADERS)
def test_which_loaders_need_no_running(kind: str) -> None:
    model = Loading([kind])
    plan = LoaderSink(model).load_plan(metadata(model.checkpoint(1)))
    assert bool(plan.opaque) == (kind in OPAQUE)
    assert [one.module for one in plan.opaque] == ["parts.0"] * len(plan.opaque)
    check_loader([kind], {}, [("full", 1), ("full", 2), ("retire", 3), ("full", 4), ("late_abort", 5), ("partial", 6)])


def test_memory_for_pieces_is_allocated_once() -> None:
    model = Loading(["Cast"])
    sink = LoaderSink(model)
    allocated = [push_by_regions(sink, model.checkpoint(state)).allocated_bytes for state in (1, 2, 3)]
    assert allocated == [(16 + 3) * 4, 0, 0]


def test_only_what_the_loader_takes_has_to_come() -> None:
    model = Loading(["Fused"])
    tensors = model.checkpoint(1)
    plan = LoaderSink(model).load_plan(metadata(tensors))
    assert plan.piece_bytes * 2 == sum(tensor.nbytes for tensor in tensors.values())


def test_an_object_that_is_no_module_by_regions() -> None:
    def checkpoint(model: Runner, state: int) -> dict[str, Tensor]:
        return model.model.checkpoint(state)

    both = Both(lambda: Runner(Loading(list(LOADERS))), checkpoint, LoaderSink)
    for number, action in enumerate(("full", "partial", "abort", "retire", "full", "late_abort", "full"), 1):
        both.step(action, number)


def test_what_the_loader_does_not_write_keeps_its_live_value() -> None:
    model = Loading(["Vocabulary"])
    one: Any = model.parts[0]
    sink = LoaderSink(model)
    for state in range(1, 4):
        with torch.no_grad():
            one.embed[5:].fill_(float(state))
            one.cache.fill_(state + 10)
            one.steps.fill_(state + 20)
        cache = one.cache.data_ptr()
        tensors = model.checkpoint(state)
        report = push_by_regions(sink, tensors)
        assert report.copied == 0
        assert same_bits(one.embed[:5], tensors["parts.0.embed"])
        assert one.embed[5:].unique().tolist() == [state]
        assert one.filled[4:].tolist() == [0, 0]
        assert (one.cache.tolist(), one.steps.item()) == ([state + 10] * 3, state + 20)
        assert one.cache.data_ptr() == cache
        assert one.head is one.embed


# When a plan holds


def replace_by_other_strides(model: Any) -> None:
    model.weight = nn.Parameter(torch.zeros(4, 3).t())


def reshape(model: Any) -> None:
    model.weight.data = torch.zeros(4, 3)


class Small(nn.Module):
    """Loads whatever has as many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))
        self.bias = nn.Parameter(torch.zeros(3))

    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            parameter = self.get_parameter(name)
            parameter.data.copy_(tensor.reshape(parameter.shape))


@pytest.mark.parametrize("change", [replace_by_other_strides, reshape])
def test_another_plan_when_the_model_has_changed(change: Any) -> None:
    model = Small()
    sink, tensors = LoaderSink(model), {"weight": torch.rand(3, 4), "bias": torch.rand(3)}
    old = sink.load_plan(metadata(tensors))
    push_by_regions(sink, tensors)
    assert sink.load_plan(metadata(tensors)) is old
    change(model)
    new = sink.load_plan(metadata(tensors))
    assert new is not old
    assert new.digest() != old.digest() or change is reshape
    sink.begin(spec_of(tensors))
    with pytest.raises(UpdateRefused, match="no longer as it was"):
        sink.landing(old)
    sink.abort()
    push_by_regions(sink, tensors)
    assert same_bits(model.weight.reshape(3, 4), tensors["weight"])


def test_another_plan_when_a_head_is_no_longer_tied() -> None:
    model = Loading(["Vocabulary"])
    one: Any = model.parts[0]
    sink, tensors = LoaderSink(model), model.checkpoint(1)
    old = sink.load_plan(metadata(tensors))
    push_by_regions(sink, tensors)
    one.head = nn.Parameter(torch.full_like(one.embed, 9.0))
    assert sink.load_plan(metadata(tensors)).digest() != old.digest()
    push_by_regions(sink, model.checkpoint(2))
    assert same_bits(one.embed[:5], model.checkpoint(2)["parts.0.embed"])
    assert one.head.unique().tolist() == [9]


def test_a_plain_module_is_planned_anew_when_it_has_changed() -> None:
    model = module(one=torch.zeros(3, 4), two=torch.zeros(5))
    sink, tensors = ModuleSink(model), {"one": torch.rand(3, 4), "two": torch.rand(5)}
    old = sink.load_plan(metadata(tensors))
    for _ in range(3):
        push_by_regions(sink, tensors)
        assert sink.load_plan(metadata(tensors)) is old
    model.one = nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(UpdateRefused, match="one"):
        sink.load_plan(metadata(tensors))
    model.one = nn.Parameter(torch.zeros(4, 3).t())
    assert sink.load_plan(metadata(tensors)).digest() == old.digest()
    push_by_regions(sink, tensors)
    assert same_bits(model.one, tensors["one"])


def test_a_plan_that_is_not_of_this_metadata() -> None:
    model = module(one=torch.zeros(3, 4), two=torch.zeros(5))
    sink, tensors = ModuleSink(model), {"one": torch.rand(3, 4), "two": torch.rand(5)}
    plan = sink.load_plan(metadata(tensors))
    sink.begin(spec_of({"one": tensors["one"]}, "partial"))
    with pytest.raises(UpdateRefused, match="two"):
        sink.landing(plan)
    sink.abort()


@pytest.mark.parametrize("strict", [True, False])
def test_names_that_the_model_lacks(strict: bool) -> None:
    model = module(one=torch.zeros(2))
    sink = ModuleSink(model, strict=strict)
    tensors = {"one": torch.ones(2), "stranger": torch.ones(3)}
    if strict:
        with pytest.raises(UpdateRefused, match="stranger"):
            sink.load_plan(metadata(tensors))
        return
    assert [meta.name for meta in sink.load_plan(metadata(tensors)).sources] == ["one"]
    push_by_regions(sink, tensors)


def test_what_a_loader_raises_when_it_is_fed_is_told_in_its_words() -> None:
    class Moody(Loading):
        moody = False

        def load_weights(self, pairs: Pairs) -> set[str]:
            if Moody.moody:
                raise KeyError("not today")
            return super().load_weights(pairs)

    model = Moody(["Cast"])
    before = copy.deepcopy(model.state_dict())
    sink, tensors = LoaderSink(model), model.checkpoint(1)
    plan = sink.load_plan(metadata(tensors))
    sink.begin(spec_of(tensors))
    Moody.moody = True
    with pytest.raises(UpdateRefused, match="load_weights of Moody raised.*not today"):
        land(sink, plan, tensors)
    sink.abort()
    assert all(same_bits(one, before[name]) for name, one in model.state_dict().items())
    Moody.moody = False
    push_by_regions(sink, tensors)
    assert same_bits(model.state_dict()["parts.0.plain"], tensors["parts.0.plain"])


# Sharded models


def sharded_by_regions(state: dict[str, Any]) -> None:
    """Each rank is brought the rows that it holds, and no others."""
    model = sink_ranks.network()
    fully_shard(model)
    sink = ModuleSink(model)
    rank = torch.distributed.get_rank()
    for seed in range(1, 4):
        new = sink_ranks.values(seed)
        plan = sink.load_plan(metadata(new))
        rows = {copied.source: copied.source_region.numel for copied in plan.copies}
        assert rows["0.weight"] == 5 * 6
        assert rows["1.weight"] == (4, 3)[rank] * 10
        assert push_by_regions(sink, new).copied == 5
        for name, parameter in model.named_parameters():
            assert same_bits(sink_ranks.whole(parameter), new[name])


@pytest.mark.thorough
def test_a_sharded_model_by_regions(ranks: BorrowRanks, tmp_path: Path) -> None:
    on_ranks(ranks, 2, tmp_path, sharded_by_regions)
