"""Looking at all of a source at once must say the same as looking at one tensor after the other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn

from weightwire.errors import SourceMismatch
from weightwire.layout import ParamMeta
from weightwire.source import ModuleSource, StateDictSource, WeightSource
from weightwire.source_check import agree, checked
from weightwire.source_reader import SourceReader

NAMES = ["a", "b", "c"]
EXPECTED = [ParamMeta(name, torch.complex64, (2, 3)) for name in NAMES]


def plain() -> list[Tensor]:
    zeros, ones, twos = (torch.full((2, 3), value, dtype=torch.complex64) for value in (0, 1, 2))
    return [zeros, nn.Parameter(ones), twos]


def test_what_is_as_declared_agrees() -> None:
    assert agree(NAMES, plain(), EXPECTED)
    assert agree([], [], [])


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.to(torch.complex128),
        lambda one: one.reshape(3, 2),
        lambda one: one.reshape(6),
        lambda one: one.to("meta"),
        lambda one: one.to_sparse(),
    ],
    ids=["dtype", "shape", "dimensions", "meta", "sparse"],
)
@pytest.mark.parametrize("index", [0, 2])
def test_what_checked_refuses_does_not_agree(change: Callable[[Tensor], Tensor], index: int) -> None:
    tensors = plain()
    tensors[index] = change(tensors[index])
    assert not agree(NAMES, tensors, EXPECTED)
    with pytest.raises(SourceMismatch, match=f"'{NAMES[index]}' at index {index}"):
        list(checked(zip(NAMES, tensors, strict=True), EXPECTED))


@pytest.mark.parametrize(
    "change", [lambda one: one.mT.contiguous().mT, torch.conj, lambda one: torch.conj(one.to(torch.complex128)).imag]
)
def test_what_has_to_be_made_plain_does_not_agree(change: Callable[[Tensor], Tensor]) -> None:
    lazy = change(torch.randn(2, 3, dtype=torch.complex64))
    expected = [ParamMeta("a", lazy.dtype, (2, 3))]
    assert not agree(["a"], [lazy], expected)
    ((_, tensor),) = checked([("a", lazy)], expected)
    assert agree(["a"], [tensor], expected)
    assert torch.equal(tensor, lazy)


@pytest.mark.parametrize("names", [["a", "b"], ["a", "c", "b"], ["a", "b", "c", "d"]])
def test_other_names_do_not_agree(names: list[str]) -> None:
    tensors = (plain() + plain())[: len(names)]
    assert not agree(names, tensors, EXPECTED)


class Ties(nn.Module):
    """Ties within a module and across two, and a parameter that is absent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.first.again = self.first.weight
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.second.own = nn.Parameter(torch.ones(2))
        self.register_parameter("none", None)
        self.last = nn.Parameter(torch.zeros(1))


def test_resident_is_what_a_pass_yields() -> None:
    module = Ties()
    source = ModuleSource(module)
    resident = source.resident()
    assert resident is not None
    named = list(module.named_parameters())
    assert resident[0] == [name for name, _ in named] == [meta.name for meta in source.metadata]
    assert all(one is other for one, (_, other) in zip(resident[1], named, strict=True))
    assert [name for name, _ in source.iter_full()] == resident[0]


def test_resident_is_read_anew() -> None:
    module = nn.Linear(2, 2, bias=False)
    source = ModuleSource(module)
    module.weight = nn.Parameter(torch.full((2, 2), 3.0))
    resident = source.resident()
    assert resident is not None
    assert resident[1][0] is module.weight


def test_only_a_dict_is_known_to_hold_its_tensors() -> None:
    tensors = {"a": torch.zeros(1), "b": torch.ones(2)}
    resident = StateDictSource(tensors).resident()
    assert resident == (["a", "b"], list(tensors.values()))
    assert StateDictSource(MappingProxyType(tensors)).resident() is None
    assert StateDictSource(lambda: tensors).resident() is None


# Many at once


def hundreds() -> tuple[list[ParamMeta], list[Tensor]]:
    """More than are compared at a time."""
    expected = [ParamMeta(f"p{number}", torch.float32, (2, 3)) for number in range(2500)]
    return expected, [torch.full((2, 3), float(number)) for number in range(2500)]


class Listed(WeightSource):
    """Yields `tensors` under the names that are expected, whatever they are."""

    def __init__(self, expected: list[ParamMeta], tensors: list[Tensor]) -> None:
        self._expected, self._tensors = expected, tensors

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return self._expected

    def resident(self) -> tuple[list[str], list[Tensor]]:
        names = [meta.name for meta in self._expected] + ["extra"]
        return names[: len(self._tensors)], self._tensors

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        return zip(*self.resident(), strict=True)


def batches(expected: list[ParamMeta], tensors: list[Tensor]) -> Iterator[tuple[list[int], list[Tensor]]]:
    return SourceReader(expected, 0, "full").batches(Listed(expected, tensors))


def test_thousands_come_by_the_block_and_once_each() -> None:
    expected, tensors = hundreds()
    blocks = list(batches(expected, tensors))
    assert len(blocks) < 5
    assert [place for places, _ in blocks for place in places] == list(range(2500))
    assert all(one is tensors[place] for places, some in blocks for place, one in zip(places, some, strict=True))


@pytest.mark.parametrize("odd", [torch.zeros(3, 2).mT, torch.zeros(2, 0).expand(2, 0)], ids=["strides", "empty"])
def test_from_the_first_odd_one_on_they_come_one_by_one(odd: Tensor) -> None:
    expected, tensors = hundreds()
    expected[1500], tensors[1500] = ParamMeta("p1500", torch.float32, tuple(odd.shape)), odd
    blocks = list(batches(expected, tensors))
    assert 1 < len(blocks[0][1]) <= 1500
    assert len(blocks[-1][1]) == 1
    assert [place for places, _ in blocks for place in places] == list(range(2500))
    found = [one for _, some in blocks for one in some]
    assert all(one.is_contiguous() and torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


def test_a_mismatch_far_behind_is_named_before_it_comes() -> None:
    expected, tensors = hundreds()
    tensors[1500] = torch.zeros(3, 2)
    came: list[int] = []
    with pytest.raises(SourceMismatch, match="'p1500' at index 1500 as torch.float32 of shape"):
        came.extend(len(some) for _, some in batches(expected, tensors))
    assert sum(came) == 1500


def test_too_few_and_too_many_are_told() -> None:
    expected, tensors = hundreds()
    with pytest.raises(SourceMismatch, match="ends at index 2499"):
        list(batches(expected, tensors[:-1]))
    with pytest.raises(SourceMismatch, match="'extra' at index 2500, after all"):
        list(batches(expected, [*tensors, tensors[0]]))
    assert list(batches([], [])) == []


def looked_at(expected: list[ParamMeta], tensors: list[Tensor]) -> tuple[list[Tensor], list[bool]]:
    """What is present, and what is said of each while it is looked at."""
    present = SourceReader(expected, 0, "full").present(Listed(expected, tensors))
    assert present is not None
    seen: list[Tensor] = []
    plain: list[bool] = []

    def note(some: Sequence[Tensor], all_plain: bool) -> None:
        seen.extend(some)
        plain.extend([all_plain] * len(some))

    present.look(note)
    assert [one.data_ptr() for one in seen] == [one.data_ptr() for one in present.tensors]
    return present.tensors, plain


def test_what_is_present_may_have_other_strides_and_must_be_what_is_declared() -> None:
    expected, tensors = hundreds()
    found, plain = looked_at(expected, tensors)
    assert found is tensors
    assert all(plain)
    tensors[1500] = torch.arange(6.0).view(3, 2).mT
    found, plain = looked_at(expected, tensors)
    assert [one.data_ptr() for one in found] == [one.data_ptr() for one in tensors]
    assert not found[1500].is_contiguous()
    assert not plain[1500]
    tensors[1600] = torch.zeros(3, 2)
    with pytest.raises(SourceMismatch, match="'p1600' at index 1600 as torch.float32 of shape"):
        looked_at(expected, tensors)
    expected, tensors = hundreds()
    with pytest.raises(SourceMismatch, match="ends at index 2499"):
        looked_at(expected, tensors[:-1])
    with pytest.raises(SourceMismatch, match="'extra' at index 2500, after all"):
        looked_at(expected, [*tensors, tensors[0]])
    assert looked_at([], []) == ([], [])


def test_what_is_remembered_of_a_walk_is_not_trusted() -> None:
    """Names and ties follow the module, whatever happens to it between two passes."""
    module = Ties()
    source = ModuleSource(module)

    def same() -> None:
        resident, named = source.resident(), dict(module.named_parameters())
        assert resident is not None
        assert resident[0] == list(named)
        assert [id(one) for one in resident[1]] == [id(one) for one in named.values()]

    def change(action: Callable[[], object]) -> None:
        same()
        action()
        same()

    for _ in range(3):
        same()
    change(lambda: setattr(module.second, "weight", nn.Parameter(torch.ones(3, 3))))
    change(lambda: setattr(module.second, "weight", module.first.bias))
    change(lambda: setattr(module, "none", nn.Parameter(torch.ones(1))))
    change(lambda: setattr(module, "none", None))
    change(lambda: setattr(module, "first", nn.Linear(3, 3)))
    change(lambda: module.add_module("later", module.first))
    change(lambda: delattr(module, "last"))
    change(lambda: setattr(module.second, "own", None))
    change(lambda: module.second._parameters.update(renamed=module.second._parameters.pop("weight")))
    change(lambda: module._modules.update(other=module._modules.pop("second")))


def test_a_source_keeps_no_tensor_that_the_module_has_dropped() -> None:
    module = nn.Linear(2, 2)
    source = ModuleSource(module)
    assert source.resident() is not None
    gone = weakref.ref(module.weight)
    module.weight = nn.Parameter(torch.zeros(2, 2))
    gc.collect()
    assert gone() is None
