"""Looking at all of a source at once must say the same as looking at one tensor after the other."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn

from weightwire.errors import SourceMismatch
from weightwire.layout import ParamMeta
from weightwire.source import ModuleSource, StateDictSource
from weightwire.source_check import agree, checked

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
