"""Models that load themselves, and how to hold a recording against plain loading."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core.tests.sink_models import content, metadata, same_bits
from weightwire.layout import ParamMeta
from weightwire.load_plan import LoadPlan
from weightwire.recorded_install import feed, from_full, from_pieces, install, tensors_of
from weightwire.recording import record_loads

Pairs = Iterable[tuple[str, Tensor]]
Loader = Callable[[Any, Pairs], object]


def module(**tensors: Tensor) -> Any:
    made: Any = nn.Module()
    for name, tensor in tensors.items():
        setattr(made, name, nn.Parameter(tensor, requires_grad=False))
    return made


def checkpoint(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return with_contents({name: torch.empty(shape) for name, shape in shapes.items()})


def with_contents(tensors: Mapping[str, Tensor], state: int = 1) -> dict[str, Tensor]:
    return {name: content(name, tensor, state) for name, tensor in tensors.items()}


def with_numbers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contents that arithmetic makes no NaN of."""
    return {name: torch.arange(1, one.numel() + 1).reshape(one.shape).to(one.dtype) for name, one in tensors.items()}


def twin_of(model: Any) -> Any:
    """The model on the meta device."""
    return copied(model, torch.device("meta"))


def copied(model: Any, device: torch.device | None = None) -> Any:
    """A copy whose tensors share storage where the model's do."""
    memo: dict[int, Any] = {}
    storages: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
        whole = storages.setdefault(storage._cdata, flat.to(device) if device else flat.clone())
        view = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(view, requires_grad=tensor.requires_grad) if parameter else view
    return copy.deepcopy(model, memo)


def each(weights: Callable[[Any, str, Tensor], object]) -> Loader:
    """A loader that does one thing for each tensor."""

    def load(model: Any, pairs: Pairs) -> None:
        for name, tensor in pairs:
            weights(model, name, tensor)

    return load


def record(model: Any, load: Loader, tensors: Mapping[str, Tensor]) -> LoadPlan:
    twin = twin_of(model)
    before = {name: (one, one.shape) for name, one in tensors_of(twin).items()}
    plan = record_loads(twin, metadata(tensors), lambda pairs: load(twin, pairs))
    assert {name: (one, one.shape) for name, one in tensors_of(twin).items()} == before
    assert LoadPlan.from_json(plan.to_json()) == plan
    return plan


def pieces_of(plan: LoadPlan, tensors: Mapping[str, Tensor]) -> dict[Any, Tensor]:
    """What a transport would bring: each piece contiguous, in memory of its own."""
    take = from_full(tensors)
    return {
        (name, region): take(name, region).clone(memory_format=torch.contiguous_format) for name, region in plan.pieces
    }


def state_of(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors_of(model).items()}


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert same_bits(tensor, second[name]), name


def check(model: Any, load: Loader, tensors: Mapping[str, Tensor]) -> LoadPlan:
    """Record on a twin, and install in every way that the plan allows: the same bits as plain loading."""
    plan = record(model, load, tensors)
    plain, fed = copied(model), copied(model)
    with torch.no_grad():
        load(plain, tensors.items())
    pieces = pieces_of(plan, tensors)
    full = {name: tensors[name].clone() for name in plan.full_sources}
    feed(plan, lambda pairs: load(fed, pairs), from_pieces(pieces), full)
    assert_same_state(plain, fed)
    if not plan.opaque:
        for resolve in (from_full(tensors), from_pieces(pieces)):
            straight = copied(model)
            install(plan, tensors_of(straight), resolve)
            assert_same_state(plain, straight)
    return plan


def metas(**shapes: tuple[int, ...]) -> list[ParamMeta]:
    return [ParamMeta(name, torch.float32, shape) for name, shape in shapes.items()]
