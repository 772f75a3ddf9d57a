"""What a sink refuses, and which sink a model gets."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from core.tests.sink_models import Zoo, content, push, same_bits, spec_of
from weightwire import staging
from weightwire.errors import TransferAborted, Unsupported, UpdateRefused
from weightwire.layout import ParamMeta
from weightwire.loader_sink import LoaderSink
from weightwire.module_sink import ModuleSink
from weightwire.sink import Patch, UpdateSpec, WeightSink, as_sink


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))  # type: ignore[no-any-return]


FULL = ("embed.weight", "norm.weight", "norm.bias")


def values(model: nn.Module, state: int, *names: str) -> dict[str, torch.Tensor]:
    tensors = model.state_dict()
    return {name: content(name, tensors[name], state) for name in names or FULL}


def with_meta(sink: WeightSink, *metas: ParamMeta, scope: Any = "partial") -> UpdateRefused:
    with pytest.raises(UpdateRefused) as caught:
        sink.begin(UpdateSpec(metas, scope))
    return caught.value


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def sink(model: Net) -> Iterator[ModuleSink]:
    """A sink whose model is unchanged, whole and takes an update when the test is over."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sink = ModuleSink(model)
    yield sink
    sink.abort()
    assert all(same_bits(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not sink.torn
    push(sink, values(model, 3))
    assert all(same_bits(model.state_dict()[name], value) for name, value in values(model, 3).items())


FLOAT = torch.float32


def test_an_unknown_name_is_refused_with_the_nearest(sink: ModuleSink) -> None:
    error = with_meta(sink, ParamMeta("head.wieght", FLOAT, (6, 4)), ParamMeta("zzz", FLOAT, ()))
    assert error.parameter == "head.wieght"
    assert "did you mean 'head.weight'" in str(error)
    assert "1 more names are unknown" in str(error)


def test_a_wrong_shape_is_refused(sink: ModuleSink) -> None:
    error = with_meta(sink, ParamMeta("norm.bias", FLOAT, (5,)))
    assert error.parameter == "norm.bias"
    assert "(4,) here, and (5,)" in str(error)


def test_a_wrong_dtype_is_refused(sink: ModuleSink) -> None:
    error = with_meta(sink, ParamMeta("norm.bias", torch.bfloat16, (4,)))
    assert "float32 here, and bfloat16" in str(error)
    assert "cast=True" in str(error)


def test_a_name_twice_is_refused(sink: ModuleSink) -> None:
    meta = ParamMeta("norm.bias", FLOAT, (4,))
    assert "twice" in str(with_meta(sink, meta, meta))


def test_two_names_of_one_tied_parameter_are_refused(sink: ModuleSink) -> None:
    error = with_meta(sink, ParamMeta("embed.weight", FLOAT, (6, 4)), ParamMeta("head.weight", FLOAT, (6, 4)))
    assert error.parameter == "head.weight"
    assert "tied" in str(error)


def test_missing_parameters_are_refused_in_a_full_update(sink: ModuleSink) -> None:
    error = with_meta(sink, ParamMeta("norm.bias", FLOAT, (4,)), scope="full")
    assert error.parameter == "embed.weight"
    assert "2 are missing: 'embed.weight', 'norm.weight'" in str(error)


def test_any_name_of_a_tied_parameter_will_do(model: Net) -> None:
    push(ModuleSink(model), values(model, 1, "head.weight", "norm.weight", "norm.bias"))
    assert same_bits(model.embed.weight, values(model, 1, "head.weight")["head.weight"])
    assert model.head.weight is model.embed.weight


def test_persistent_buffers_are_accepted_and_not_required(model: Net) -> None:
    names = (*FULL, "norm.running_mean", "norm.num_batches_tracked")
    push(ModuleSink(model), values(model, 1, *names))
    assert all(same_bits(model.state_dict()[name], value) for name, value in values(model, 1, *names).items())


def test_scope_is_checked() -> None:
    with pytest.raises(ValueError, match="half"):
        UpdateSpec((), "half")  # type: ignore[arg-type]


def test_begin_twice_is_our_own_mistake(sink: ModuleSink, model: Net) -> None:
    sink.begin(spec_of(values(model, 1)))
    with pytest.raises(AssertionError):
        sink.begin(spec_of(values(model, 1)))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("norm.bias", torch.zeros(5)),
        ("norm.bias", torch.zeros(4, dtype=torch.float16)),
        ("norm.biass", torch.zeros(4)),
        ("norm.running_mean", torch.zeros(4)),
    ],
)
def test_load_and_adopt_check_again(sink: ModuleSink, model: Net, name: str, tensor: torch.Tensor) -> None:
    sink.begin(spec_of(values(model, 1)))
    with pytest.raises(UpdateRefused) as caught:
        sink.load([(name, tensor)])
    assert caught.value.parameter == name
    with pytest.raises(UpdateRefused):
        sink.adopt({name: tensor})


def test_nothing_may_come_twice(sink: ModuleSink, model: Net) -> None:
    bias = torch.zeros(4)
    sink.begin(spec_of(values(model, 1)))
    sink.load([("norm.bias", bias)])
    with pytest.raises(UpdateRefused, match="came twice"):
        sink.load([("norm.bias", bias)])
    with pytest.raises(UpdateRefused, match="came twice"):
        sink.received(["norm.bias"])
    with pytest.raises(UpdateRefused, match="'norm.weight' came twice"):
        sink.received(["norm.weight", "norm.weight"])
    with pytest.raises(UpdateRefused, match="came twice"):
        sink.adopt({"norm.bias": bias})
    with pytest.raises(UpdateRefused, match="came twice"):
        sink.patch([Patch("norm.bias", torch.tensor([1]), torch.zeros(1))])


def test_a_tensor_may_be_overwritten_once_the_next_one_is_asked_for(model: Net) -> None:
    sink, new = ModuleSink(model), values(model, 1)
    largest = torch.empty(max(tensor.numel() for tensor in new.values()))

    def through_one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in new.items():
            yield name, largest[: tensor.numel()].view(tensor.shape).copy_(tensor)

    for _ in range(3):
        sink.begin(spec_of(new))
        sink.targets(new)
        sink.load(through_one_buffer())
        sink.prepare()
        sink.commit()
        assert all(same_bits(model.state_dict()[name], tensor) for name, tensor in new.items())


def test_everything_has_to_come(sink: ModuleSink, model: Net) -> None:
    sink.begin(spec_of(values(model, 1)))
    sink.targets(FULL)
    sink.received(["norm.bias"])
    with pytest.raises(UpdateRefused, match="2 parameters of the update never came: 'embed.weight'") as caught:
        sink.prepare()
    assert caught.value.parameter == "embed.weight"


def test_a_load_that_is_aborted_from_another_thread_stops(sink: ModuleSink, model: Net) -> None:
    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield "norm.bias", torch.zeros(4)
        sink.abort(retire=True)
        yield "norm.weight", torch.zeros(4)

    sink.begin(spec_of(values(model, 1)))
    with pytest.raises(TransferAborted):
        sink.load(pairs())


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (Patch("norm.bias", torch.tensor([[0]]), torch.zeros(1, 1)), "1-D"),
        (Patch("norm.bias", torch.tensor([0.0]), torch.zeros(1)), "int32 or int64"),
        (Patch("norm.bias", torch.tensor([0, 1]), torch.zeros(1)), "2 positions"),
        (Patch("norm.bias", torch.tensor([0]), torch.zeros(1, dtype=torch.int32)), "int32"),
        (Patch("norm.bias", torch.tensor([3, 4]), torch.zeros(2)), "position 4 of 4"),
        (Patch("norm.bias", torch.tensor([2, -1]), torch.zeros(2)), "position -1 of 4"),
        (Patch("norm.bias", torch.tensor([2, 0, 2]), torch.zeros(3)), "position 2 twice"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(sink: ModuleSink, model: Net, patch: Patch, words: str) -> None:
    sink.begin(spec_of(values(model, 1, "norm.bias"), "partial"))
    sink.patch([patch])
    with pytest.raises(UpdateRefused, match=words):
        sink.prepare()


def test_without_strict_unknown_names_are_ignored_and_missing_ones_stay(model: Net) -> None:
    sink = ModuleSink(model, strict=False)
    bias, stranger = values(model, 1, "norm.bias"), torch.zeros(2)
    before = model.embed.weight.detach().clone()
    sink.begin(spec_of({**bias, "stranger": stranger, "patched": stranger, "adopted": stranger}))
    assert sink.targets(["norm.bias", "stranger"]).keys() == {"norm.bias"}
    sink.load([*bias.items(), ("stranger", stranger)])
    sink.patch([Patch("patched", torch.tensor([0]), torch.zeros(1))])
    sink.adopt({"adopted": stranger})
    with pytest.raises(UpdateRefused):
        sink.load([("never announced", stranger)])
    sink.prepare()
    sink.commit()
    assert same_bits(model.norm.bias, bias["norm.bias"])
    assert same_bits(model.embed.weight, before)


@pytest.mark.parametrize("way", ["load", "targets", "adopt", "patch"])
@pytest.mark.parametrize("options", [{}, {"commit": "copy"}, {"staging": "in_place"}])
def test_cast_converts(model: Net, way: str, options: dict[str, Any]) -> None:
    sink = ModuleSink(model, cast=True, **options)
    wanted = torch.tensor([1.5, -2.0, torch.inf, 0.25])
    sent = wanted.to(torch.bfloat16)
    sink.begin(UpdateSpec((ParamMeta("norm.bias", torch.bfloat16, (4,)),), "partial"))
    if way == "load":
        sink.load([("norm.bias", sent)])
    elif way == "targets":
        target = sink.targets(["norm.bias"])["norm.bias"]
        assert target.dtype == torch.bfloat16
        target.copy_(sent)
        sink.received(["norm.bias"])
    elif way == "adopt":
        sink.adopt({"norm.bias": sent})
    else:
        sink.patch([Patch("norm.bias", torch.arange(4), sent)])
    sink.prepare()
    sink.commit()
    assert torch.equal(model.norm.bias, wanted)
    assert model.norm.bias.dtype == torch.float32


def test_cast_refuses_to_lose_a_kind(model: Net) -> None:
    error = with_meta(ModuleSink(model, cast=True), ParamMeta("norm.num_batches_tracked", FLOAT, ()))
    assert "no cast" in str(error)


def test_parameters_without_memory_are_refused() -> None:
    with torch.device("meta"):
        unreal = nn.Linear(2, 2)
    assert "meta device" in str(with_meta(ModuleSink(unreal), ParamMeta("bias", FLOAT, (2,))))
    assert "initialised" in str(with_meta(ModuleSink(nn.LazyLinear(2)), ParamMeta("bias", FLOAT, (2,))))


def test_a_frozen_graph_is_refused(sink: ModuleSink, model: Net) -> None:
    config = types.SimpleNamespace(freezing=True)
    with (
        mock.patch.dict(sys.modules, {"torch._inductor.config": config}),
        pytest.raises(UpdateRefused, match="freezing"),
    ):
        sink.begin(spec_of(values(model, 1)))


def test_as_sink_returns_the_same_sink_for_the_life_of_a_model(model: Net) -> None:
    sink = as_sink(model, staging="in_place")
    assert as_sink(model) is sink
    assert as_sink(model, staging="in_place", strict=True) is sink
    assert as_sink(sink) is sink
    with pytest.raises(ValueError, match="staging"):
        as_sink(model, staging="staged")
    with pytest.raises(ValueError, match="neither"):
        as_sink(Net(), staging="neither")  # type: ignore[arg-type]
    assert as_sink(Net()) is not sink


def test_a_sink_does_not_keep_its_model() -> None:
    model = Net()
    sink, gone = weakref.ref(as_sink(model)), weakref.ref(model)
    push(as_sink(model), values(model, 1))
    del model
    gc.collect()
    assert gone() is None
    assert sink() is None


def test_as_sink_chooses() -> None:
    class Loading(Net):
        def load_weights(self, pairs: Any) -> None:
            """Load nothing."""

    loading = Loading()
    assert isinstance(as_sink(loading), LoaderSink)
    assert isinstance(as_sink(nn.Linear(1, 1)), ModuleSink)
    with pytest.raises(TypeError, match="int"):
        as_sink(3)


def test_ways_a_sink_lacks_say_so() -> None:
    class Loading:
        def load_weights(self, pairs: Any) -> None:
            """Load nothing."""

    holder = Loading()
    sink = as_sink(holder)
    assert sink.capabilities == {"load"}
    calls: tuple[Any, ...] = (sink.targets, sink.received, sink.adopt, sink.patch)
    for call in calls:
        with pytest.raises(Unsupported, match="it has load"):
            call({})


def test_checksums_cover_parameters_and_persistent_buffers_once(model: Net) -> None:
    sink = ModuleSink(model)
    before = sink.checksums()
    assert list(before) == ["embed.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
                            "norm.num_batches_tracked"]  # fmt: skip
    push(sink, values(model, 1, "norm.bias"), "partial")
    after = sink.checksums()
    assert {name for name in before if before[name] != after[name]} == {"norm.bias"}
    other = Net()
    other.load_state_dict(model.state_dict())
    assert ModuleSink(other).checksums() == after


def test_the_inventory_says_what_an_update_may_bring(sink: ModuleSink, model: Net) -> None:
    held = sink.inventory()
    assert [(one.names, one.shape, one.buffer) for one in held] == [
        (("embed.weight", "head.weight"), (6, 4), False),
        (("norm.weight",), (4,), False),
        (("norm.bias",), (4,), False),
        (("norm.running_mean",), (4,), True),
        (("norm.running_var",), (4,), True),
        (("norm.num_batches_tracked",), (), True),
    ]
    assert held[-1].to_json() == {
        "dtype": "int64",
        "shape": [],
        "local_shape": [],
        "names": ["norm.num_batches_tracked"],
        "buffer": True,
    }


def test_checksums_do_not_depend_on_strides() -> None:
    turned: Any = Zoo(["transposed", "gapped", "scalar", "empty"])
    plain: Any = Zoo(["transposed"])
    plain.parts[0].turned = nn.Parameter(turned.parts[0].turned.data.contiguous())
    assert ModuleSink(turned).checksums()["parts.0.turned"] == ModuleSink(plain).checksums()["parts.0.turned"]


def test_reset_zeroes_parameters(model: Net) -> None:
    sink = ModuleSink(model)
    model.norm.running_mean = torch.ones(4)
    sink.reset()
    assert not any(bool(parameter.any()) for parameter in model.parameters())
    assert bool(model.norm.running_mean.all())
    push(sink, values(model, 1))
    assert same_bits(model.norm.bias, values(model, 1)["norm.bias"])


def test_names_of_wrapped_modules_are_those_of_the_plain_model(model: Net) -> None:
    compiled = torch.compile(model, backend="eager")
    sink = ModuleSink(compiled)  # type: ignore[arg-type]
    push(sink, values(model, 1))
    assert next(iter(sink.checksums())) == "embed.weight"
    push(sink, {f"_orig_mod.{name}": value for name, value in values(model, 2).items()})
    assert same_bits(model.norm.bias, values(model, 2)["norm.bias"])


def test_poison_shows_where_nothing_came(model: Net) -> None:
    sink = ModuleSink(model)
    with mock.patch.object(staging, "POISON", True):
        for _ in range(3):
            sink.begin(spec_of(values(model, 1)))
            for target in sink.targets(FULL).values():
                assert bool((target.reshape(-1).view(torch.uint8) == 0xA5).all())
                target.zero_()
            sink.received(FULL)
            sink.prepare()
            sink.commit()
