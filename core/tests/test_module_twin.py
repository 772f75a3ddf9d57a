"""Copies of models that loaders are tried on."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.tests.recording_models import Pairs, state_of
from core.tests.region_models import push_by_regions
from core.tests.sink_models import DTYPES, KINDS, Zoo, content, metadata, push, same_bits, targets_of
from weightwire.loader_sink import LoaderSink
from weightwire.module_twin import meta_twin, twin_of

Twin = Callable[[nn.Module], Any]
both = pytest.mark.parametrize("twin", [twin_of, meta_twin])


def place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()


def sharing(model: nn.Module) -> list[tuple[int, int]]:
    """For each tensor which object and which storage it is, as numbers."""
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    return [
        (
            objects.setdefault(id(tensor), len(objects)),
            storages.setdefault(tensor.untyped_storage()._cdata, len(storages)),
        )
        for tensor in state_of_objects(model).values()
    ]


def state_of_objects(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_lie_and_are_shared_as_in_the_model(twin: Twin, dtype: torch.dtype) -> None:
    model = Zoo(KINDS, dtype)
    with torch.no_grad():
        for name, tensor in targets_of(model).items():
            tensor.copy_(content(name, tensor, 1))
    before = {name: tensor.clone() for name, tensor in state_of(model).items()}
    made = twin(model)
    assert sharing(made) == sharing(model)
    for name, tensor in state_of_objects(made).items():
        live = state_of_objects(model)[name]
        assert type(tensor) is type(live)
        assert tensor.requires_grad == live.requires_grad
        assert place(tensor) == place(live)
        assert tensor.is_meta == (twin is meta_twin)
        assert tensor.untyped_storage()._cdata != live.untyped_storage()._cdata
        assert tensor.is_meta or same_bits(tensor, live)
    with torch.no_grad():
        for tensor in state_of_objects(made).values():
            tensor.zero_()
    assert all(same_bits(tensor, before[name]) for name, tensor in state_of(model).items())
    assert made.state_dict().keys() == model.state_dict().keys()


@both
def test_what_is_persistent_and_what_is_absent(twin: Twin) -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    model.register_buffer("absent", None)
    model.register_parameter("none", None)
    made = twin(model)
    assert list(made.state_dict()) == ["kept"]
    assert (made.absent, made.none) == (None, None)
    assert made.scratch.shape == (3,)


@both
def test_what_refers_to_tensors_refers_to_the_copies(twin: Twin) -> None:
    model: Any = nn.Linear(2, 3)
    model.mine = [model.weight, {"bias": model.bias}]
    model.weight.neighbour = model.bias
    model.weight.grad = torch.ones(3, 2)
    made = twin(model)
    assert made.mine[0] is made.weight
    assert made.mine[1]["bias"] is made.weight.neighbour is made.bias
    assert made.weight.grad is None
    assert model.weight.grad is not None


class Loaded(nn.Parameter):
    """A parameter that knows how it is loaded, as serving code has them."""

    def __new__(cls, data: Tensor, **_: Any) -> Loaded:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Tensor, *, loader: Callable[..., None], dim: int) -> None:
        self._loader = loader
        self.dim_of_shards = dim

    @property
    def loader(self) -> Callable[..., None]:
        return self._loader

    def load(self, tensor: Any) -> None:
        self._loader(self, tensor)


class Columns(nn.Module):
    """This rank's columns; three ways in which a loader hangs on a parameter."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.calls = 0
        weight: Any = nn.Parameter(torch.zeros(4, 3))
        weight.weight_loader = self.load
        weight.notes = {"seen": [weight]}
        scale: Any = nn.Parameter(torch.zeros(2))
        scale.weight_loader = functools.partial(Columns.load, self)
        self.weight, self.scale = weight, scale
        self.shard = Loaded(torch.zeros(2, 3), loader=self.load, dim=0)

    def load(self, parameter: Tensor, tensor: Any) -> None:
        self.calls += 1
        parameter.data.copy_(tensor.chunk(2)[self.rank])


class Model(nn.Module):
    """Loads through what hangs on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Columns(rank) for rank in (0, 1))

    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            parameter: Any = self.get_parameter(name)
            if isinstance(parameter, Loaded):
                parameter.load(tensor)
            else:
                parameter.weight_loader(parameter, tensor)

    def checkpoint(self, state: int) -> dict[str, Tensor]:
        likes = {name: torch.empty(2 * len(one), *one.shape[1:]) for name, one in self.named_parameters()}
        return {name: content(name, like, state) for name, like in likes.items()}

    def holds(self, tensors: dict[str, Tensor]) -> bool:
        return all(
            same_bits(one, tensors[name].chunk(2)[int(name.split(".")[1])]) for name, one in self.named_parameters()
        )


@both
def test_loaders_that_hang_on_parameters_are_those_of_the_copy(twin: Twin) -> None:
    model: Any = Model()
    made = twin(model)
    for layer in made.layers:
        assert layer.weight.weight_loader.__self__ is layer
        assert layer.weight.notes["seen"][0] is layer.weight
        assert layer.scale.weight_loader.args == (layer,)
        assert layer.shard.loader.__self__ is layer
        assert layer.shard.dim_of_shards == 0
        assert type(layer.shard) is Loaded
    live: Any = model.layers[0]
    assert live.weight.weight_loader.__self__ is live.shard.loader.__self__ is live


@pytest.mark.parametrize("way", [push, push_by_regions])
def test_a_model_whose_loaders_hang_on_its_parameters(way: Any) -> None:
    model: Any = Model()
    sink = LoaderSink(model)
    assert (sink.staging, sink.reason) == ("staged", None)
    objects = dict(model.named_parameters())
    plan = sink.load_plan(metadata(model.checkpoint(1)))
    assert not plan.opaque
    for state in range(1, 4):
        tensors = model.checkpoint(state)
        assert way(sink, tensors).copied == 0
        assert model.holds(tensors)
    assert dict(model.named_parameters()) == objects
    assert [layer.calls for layer in model.layers] == [0, 0]
    assert model.layers[1].weight.weight_loader.__self__ is model.layers[1]


def test_a_model_that_cannot_be_copied_lands_whole() -> None:
    model: Any = Model()
    model.lock = threading.Lock()
    for twin in (twin_of, meta_twin):
        with pytest.raises(TypeError, match="lock"):
            twin(model)
    sink = LoaderSink(model)
    assert sink.staging == "in_place"
    for state in (1, 2):
        push_by_regions(sink, model.checkpoint(state))
        assert model.holds(model.checkpoint(state))


@both
def test_weights_of_inference_mode(twin: Twin) -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    made = twin(model)
    assert not made.weight.is_inference()
    assert made.weight.shape == (2, 2)
