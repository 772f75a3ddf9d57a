"""What cannot be patched, what does not fit together, and that nothing is written then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.tests.patch_scenes import patched, sums
from core.tests.recording_models import Pairs, module
from core.tests.region_models import OPAQUE, Loading, push_by_regions
from core.tests.sink_models import metadata, push, spec_of
from weightwire.errors import Unsupported, UpdateRefused
from weightwire.layout import ParamMeta
from weightwire.loader_sink import LoaderSink
from weightwire.module_sink import ModuleSink
from weightwire.sink import Patch, UpdateSpec, WeightSink

# Models that cannot be patched


@pytest.mark.parametrize("kind", sorted(OPAQUE))
def test_what_only_the_loader_can_do_is_no_patch(kind: str) -> None:
    model = Loading(["Fused", kind])
    sink, tensors = LoaderSink(model), model.checkpoint(1)
    push(sink, tensors)
    before, reason = sums(model), sink.unpatchable(metadata(tensors))
    assert reason is not None
    assert "'parts.1' takes tensors through its loader alone" in reason
    with pytest.raises(UpdateRefused, match="parts.1"):
        patched(sink, [Patch("parts.0.q", torch.tensor([1]), torch.ones(1))], tensors)
    sink.abort()
    assert sums(model) == before
    push(sink, model.checkpoint(2))


class Windows(nn.Module):
    """Loads overlapping windows of what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))

    def load_weights(self, pairs: Pairs) -> None:
        for _, tensor in pairs:
            self.weight.data.copy_(tensor.unfold(0, 2, 1))


def test_parts_that_overlap_are_no_patch() -> None:
    model = Windows()
    sink, tensors = LoaderSink(model), {"weight": torch.rand(4)}
    push_by_regions(sink, tensors)
    assert "'weight' that are loaded overlap" in str(sink.unpatchable(metadata(tensors)))


def test_an_object_that_is_no_module_is_no_patch() -> None:
    class Runner:
        def load_weights(self, pairs: Pairs) -> None:
            """Load nothing."""

    runner = Runner()
    sink, meta = LoaderSink(runner), ParamMeta("w", torch.float32, (2,))
    assert "no nn.Module" in str(sink.unpatchable([meta]))
    sink.begin(UpdateSpec((meta,)))
    for call in (sink.patch, sink.keep):
        with pytest.raises(Unsupported, match="it has load"):
            call([])


# What is refused


Scene = tuple[nn.Module, WeightSink, dict[str, Tensor]]


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    tensors = {"one": torch.rand(3, 4), "two": torch.rand(5)}
    return module(**{name: one.clone() for name, one in tensors.items()}), tensors


class Small(nn.Module):
    """As `small`, with a loader."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, one in tensors.items():
            self.register_parameter(name, nn.Parameter(one.clone()))

    def load_weights(self, pairs: Pairs) -> None:
        for name, one in pairs:
            self.get_parameter(name).data.copy_(one)


def sinks() -> list[Scene]:
    plain, tensors = small()
    loading = Small(tensors)
    return [(plain, ModuleSink(plain), tensors), (loading, LoaderSink(loading), tensors)]


ONE = Patch("one", torch.tensor([5]), torch.ones(1))


def bring(sink: WeightSink, calls: list[tuple[str, Any]]) -> None:
    for way, given in calls:
        getattr(sink, way)(given)
    sink.prepare()


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([("patch", [ONE, ONE])], "'one' came twice"),
        ([("patch", [ONE]), ("keep", ["one"])], "'one' came twice"),
        ([("keep", ["one"]), ("patch", [ONE])], "'one' came twice"),
        ([("keep", ["one", "one"])], "'one' came twice"),
        ([("keep", ["stranger"])], "'stranger' is not in this update"),
        ([("patch", [Patch("stranger", None, torch.ones(1))])], "'stranger' is not in this update"),
        ([("patch", [ONE])], "'two'"),
        ([("patch", [ONE]), ("load", [("one", torch.ones(3, 4))])], "came twice|goes through the model's loader"),
    ],
)
def test_what_does_not_fit_together_is_refused(calls: list[tuple[str, Any]], words: str) -> None:
    for model, sink, tensors in sinks():
        before = sums(model)
        sink.begin(spec_of(tensors))
        with pytest.raises(UpdateRefused, match=words):
            bring(sink, calls)
        sink.abort()
        assert sums(model) == before


def test_a_loader_takes_patches_or_everything() -> None:
    _, sink, tensors = sinks()[1]
    plan = sink.load_plan(metadata(tensors))
    ways: list[Callable[[], object]] = [
        lambda: sink.load([("two", tensors["two"])]),
        lambda: sink.landing(plan),
    ]
    for way in ways:
        for first, second in ((way, lambda: sink.patch([ONE])), (lambda: sink.keep(["one"]), way)):
            sink.begin(spec_of(tensors))
            first()
            with pytest.raises(UpdateRefused, match="either patches"):
                second()
            sink.abort()


def test_later_calls_go_on_top() -> None:
    for model, sink, tensors in sinks():
        sink.begin(spec_of(tensors))
        sink.keep(["two"])
        for value in (1.0, 2.0):
            sink.patch([Patch("one", torch.tensor([5, 7]), torch.tensor([value, 3 * value]))])
        sink.patch([Patch("one", torch.tensor([7]), torch.tensor([9.0]))])
        sink.prepare()
        assert sink.commit().patched == 1
        one = model.get_parameter("one").detach().reshape(-1)
        assert (one[5].item(), one[7].item()) == (2.0, 9.0)


def test_torn_weights_are_no_base() -> None:
    model, tensors = small()
    loading = Small(tensors)
    for sink in (ModuleSink(model, staging="in_place"), LoaderSink(loading, staging="in_place")):
        sink.begin(spec_of(tensors))
        sink.load([("one", tensors["one"])])
        sink.abort()
        assert sink.torn
        assert "torn" in str(sink.unpatchable(metadata(tensors)))
        with pytest.raises(UpdateRefused, match="torn"):
            patched(sink, [ONE], tensors)
        sink.abort()
        push(sink, tensors)
        assert sink.unpatchable(metadata(tensors)) is None
        patched(sink, [ONE], tensors)


def test_casts_are_no_patch() -> None:
    model, tensors = small()
    sink = ModuleSink(model, cast=True)
    wide = {name: one.double() for name, one in tensors.items()}
    assert "'one' is cast" in str(sink.unpatchable(metadata(wide)))
    assert "'stranger'" in str(sink.unpatchable([ParamMeta("stranger", torch.float32, (1,))]))


def test_an_outcome_is_of_the_plan_that_was_told() -> None:
    _, sink, tensors = sinks()[1]
    old = copy.copy(sink.load_plan(metadata(tensors)))
    sink.begin(spec_of(tensors))
    sink.keep(tensors)
    with pytest.raises(UpdateRefused, match="no longer as it was"):
        sink.outcome(old)
