"""Rounds that repeat: storages only change places, until something has happened to the model in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from core.tests.sink_models import content, parameter, same_bits, spec_of, targets_of
from weightwire import inventory, staging
from weightwire.errors import UpdateRefused
from weightwire.module_sink import ModuleSink
from weightwire.sink import CommitReport, UpdateSpec

MANY = 11
LATE = "9"


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    """A model of `MANY` parameters is compared in three blocks, and `LATE` is in the last."""
    with mock.patch.object(inventory, "_BLOCK", 4):
        yield


def receive(sink: ModuleSink, spec: UpdateSpec, tensors: Mapping[str, torch.Tensor]) -> CommitReport:
    """A whole update that is received straight to its targets, as transports do."""
    sink.begin(spec)
    for name, target in sink.targets(tensors).items():
        target.copy_(tensors[name])
    sink.received(tensors)
    sink.prepare()
    return sink.commit()


class Repeated:
    """A model that gets one full update after the other, and what happens to it meanwhile."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.sink = ModuleSink(self.model)
        self.names = list(targets_of(self.model))
        self.spec = spec_of(targets_of(self.model))
        self.state = 0
        self.held: dict[str, torch.Tensor] = {}
        self.expected = {name: tensor.detach().clone() for name, tensor in targets_of(self.model).items()}

    def fresh(self, names: list[str]) -> dict[str, torch.Tensor]:
        self.state += 1
        return {name: content(name, self.expected[name], self.state) for name in names}

    def round(self, seed: int) -> None:
        new = self.fresh(self.names)
        report = receive(self.sink, self.spec, new)
        assert report.copied == len(self.held)
        self.expected.update(new)

    def partial(self, seed: int) -> None:
        new = self.fresh(self.names[seed % 3 : 5])
        receive(self.sink, spec_of(new, "partial"), new)
        self.expected.update(new)

    def hold(self, seed: int) -> None:
        name = self.names[seed % len(self.names)]
        self.held[name] = targets_of(self.model)[name].detach()

    def release(self, seed: int) -> None:
        self.held.clear()

    def moved(self, seed: int) -> None:
        name = self.names[seed % len(self.names)]
        if name not in self.held:
            tensor = targets_of(self.model)[name]
            tensor.data = tensor.data.clone()

    def aborted(self, seed: int) -> None:
        self.sink.begin(self.spec)
        for target in self.sink.targets(self.names).values():
            target.zero_()
        if seed & 1:
            self.sink.received(self.names)
            self.sink.prepare()
        self.sink.abort(retire=bool(seed & 2))

    def check(self) -> None:
        live = targets_of(self.model)
        assert [name for name in self.names if not same_bits(live[name], self.expected[name])] == []
        assert [name for name, view in self.held.items() if not same_bits(live[name], view)] == []


actions = st.sampled_from(["round", "round", "round", "partial", "hold", "release", "moved", "aborted"])


@pytest.mark.parametrize("poison", [False, True])
@given(history=st.lists(st.tuples(actions, st.integers(0, 11)), min_size=4, max_size=14))
def test_what_happens_between_repeated_rounds_is_noticed(poison: bool, history: list[tuple[str, int]]) -> None:
    torch.set_num_threads(1)
    with mock.patch.object(staging, "POISON", poison):
        run = Repeated()
        for action, seed in [*history, ("release", 0), *[("round", 0)] * 4]:
            getattr(run, action)(seed)
            run.check()


def many(rounds: int = 5) -> tuple[nn.Module, ModuleSink, Callable[[int], CommitReport]]:
    """A model, its sink after some rounds, and one more round."""
    model = nn.ParameterList(parameter(torch.zeros(2, 2)) for _ in range(MANY))
    sink, spec = ModuleSink(model), spec_of(targets_of(model))

    def one_round(state: int) -> CommitReport:
        tensors = {str(index): torch.full((2, 2), float(state + index)) for index in range(MANY)}
        report = receive(sink, spec, tensors)
        assert all(map(torch.equal, model, tensors.values()))
        return report

    allocated = [one_round(state).allocated_bytes for state in range(rounds)]
    assert not any(allocated[2:])
    return model, sink, one_round


@pytest.mark.parametrize("rounds", [2, 3, 4, 5])
def test_one_held_view_among_many_costs_one_copy(rounds: int) -> None:
    model, _, one_round = many(rounds)
    live = [parameter.data_ptr() for parameter in model.parameters()]
    view = model.get_parameter(LATE).detach()
    report = one_round(6)
    assert (report.swapped, report.copied, report.allocated_bytes) == (MANY - 1, 1, 0)
    moved = [one.data_ptr() != before for one, before in zip(model.parameters(), live, strict=True)]
    assert [index for index, changed in enumerate(moved) if not changed] == [int(LATE)]
    assert torch.equal(view, model.get_parameter(LATE))
    del view
    for state in (7, 8, 9):
        report = one_round(state)
        assert (report.swapped, report.allocated_bytes) == (MANY, 0)


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[nn.Module, Callable[[int], CommitReport]]:
    model, _, one_round = many()
    tensor = model.get_parameter(LATE)
    tensor.data = change(tensor.data)
    return model, one_round


def test_new_memory_is_noticed_though_the_old_one_has_as_many_users() -> None:
    model, _, one_round = many()
    tensor = model.get_parameter(LATE)
    old, tensor.data = tensor.data, torch.zeros(2, 2)
    kept = old.clone()
    for state in (6, 7, 8):
        one_round(state)
        assert torch.equal(old, kept), "it is nobody's weights any more, and nobody's staging"


def test_other_strides_over_the_same_memory_are_noticed() -> None:
    model, one_round = changed(torch.t)
    for state in (6, 7, 8):
        one_round(state)
        assert model.get_parameter(LATE).stride() == (1, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.view(4), r"'9' has shape \(4,\) here"),
        (lambda data: data.view(torch.int32), "'9' is int32 here"),
        (lambda data: data[:1], r"'9' has shape \(1, 2\) here"),
        (lambda data: data.double(), "'9' is float64 here"),
    ],
)
def test_what_no_longer_fits_is_noticed(change: Callable[[torch.Tensor], torch.Tensor], words: str) -> None:
    _, one_round = changed(change)
    with pytest.raises(UpdateRefused, match=words):
        one_round(6)


@pytest.mark.parametrize("where", ["_parameters", "_modules"])
def test_what_is_put_where_nothing_was_is_noticed(where: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    sink, tensors = ModuleSink(model), targets_of(model)
    spec, new = spec_of(tensors), {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    for _ in range(4):
        receive(sink, spec, new)
    if where == "_parameters":
        model[1].register_parameter("slope", parameter(torch.zeros(1)))
    else:
        model[1].add_module("below", nn.Linear(1, 1))
    with pytest.raises(UpdateRefused, match=r"missing: '1\.(slope|below\.weight)'"):
        sink.begin(spec)


def test_a_name_that_comes_again_is_named_though_it_came_among_many() -> None:
    _, sink, _ = many()
    names = [str(index) for index in range(MANY)]
    sink.begin(spec_of({name: torch.zeros(2, 2) for name in names}))
    sink.targets(names)
    sink.received(names[:7])
    with pytest.raises(UpdateRefused, match="'6' came twice") as caught:
        sink.received(names[6:])
    assert caught.value.parameter == "6"


def test_what_changed_between_the_sink_and_its_first_update_is_noticed() -> None:
    model = nn.Linear(2, 2, bias=False)
    sink, new = ModuleSink(model), {"weight": torch.ones(2, 2)}
    model.weight.data = torch.zeros(2, 2)
    view = model.weight.detach()
    assert receive(sink, spec_of(new), new).copied == 1
    assert torch.equal(view, new["weight"])


def test_some_of_the_targets_or_in_another_order() -> None:
    _, sink, _ = many()
    names = [str(index) for index in range(MANY)]
    sink.begin(spec_of({name: torch.zeros(2, 2) for name in names}))
    everything = sink.targets(names)
    assert list(everything) == names
    everything.clear()
    assert list(sink.targets(names[::-1])) == names[::-1]
    assert list(sink.targets([LATE])) == [LATE]
    assert sink.targets([]) == {}
    assert sink.targets(names)[LATE] is sink.targets([LATE])[LATE]
