from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from weightwire import layout
from weightwire.dtensor import cutting_order
from weightwire.errors import MetadataError, SourceMismatch, Unsupported
from weightwire.layout import ParamMeta, cut
from weightwire.source import ModuleSource, StateDictSource, WeightSource, as_bytes
from weightwire.source_check import checked
from weightwire.testing.strategies import odd_tensors, state_dicts, tensors

Pairs = list[tuple[str, Tensor]]


class Tied(nn.Module):
    """An embedding tied to the head, a persistent and a passing buffer, one buffer registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        step = torch.tensor(7)
        self.register_buffer("step", step)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.body.register_buffer("step", step)
        self.body.register_buffer("mean", torch.ones(4))
        self.body.register_buffer("absent", None)


def same_bits(one: Tensor, other: Tensor) -> bool:
    plain = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*map(as_bytes, plain))


# The ABC


def test_metadata_must_be_a_cached_property() -> None:
    with pytest.raises(TypeError, match="Changing.metadata must be a functools.cached_property"):

        class Changing(WeightSource):
            @property
            def metadata(self) -> list[ParamMeta]:
                return []


class FullOnly(WeightSource):
    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta("a", torch.int8, ()), ParamMeta("b", torch.int8, (), owners=(1,))]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.tensor(1, dtype=torch.int8)


def test_modes_and_owned_names() -> None:
    source = FullOnly()
    assert source.implements_iter_full()
    assert not source.implements_iter_local()
    with pytest.raises(Unsupported, match="FullOnly does not implement iter_local"):
        source.iter_local()
    assert source.owned_names(0) == ["a"]
    assert source.owned_names(1) == ["a", "b"]


# Modules


def test_parameters_themselves_in_order_tied_ones_once() -> None:
    module = Tied()
    source = ModuleSource(module)
    assert [meta.name for meta in source.metadata] == ["embed.weight", "body.weight", "body.bias"]
    assert source.metadata[0] == ParamMeta("embed.weight", torch.float32, (5, 4))
    for _ in range(2):
        for pairs in (source.iter_full(), source.iter_local()):
            for (name, tensor), (expected, parameter) in zip(pairs, module.named_parameters(), strict=True):
                assert name == expected
                assert tensor is parameter
    assert (source.gathered, source.mesh_ranks(), source.device) == ({}, set(), torch.device("cpu"))


def test_persistent_buffers_once_and_after_the_parameters() -> None:
    module = Tied()
    pairs = dict(ModuleSource(module, buffers=True).iter_full())
    assert list(pairs)[3:] == ["step", "body.mean"]
    assert pairs["step"] is module.step
    persistent = module.state_dict().keys() - {"head.weight", "body.step"}
    assert pairs.keys() == persistent


def test_metadata_is_kept_and_values_are_read_anew() -> None:
    module = nn.Linear(2, 2, bias=False)
    source = ModuleSource(module)
    assert source.metadata is source.metadata
    module.weight.data = torch.full((2, 2), 3.0)
    assert torch.equal(dict(source.iter_full())["weight"], torch.full((2, 2), 3.0))


def test_a_module_without_parameters() -> None:
    source = ModuleSource(nn.ReLU(), buffers=True)
    assert source.metadata == []
    assert list(source.iter_local()) == []
    assert source.device == torch.device("cpu")


def compiled(module: nn.Module) -> nn.Module:
    wrapped = torch.compile(module, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


def test_names_are_the_models_own() -> None:
    model = nn.Sequential(compiled(nn.Linear(2, 2)), checkpoint_wrapper(nn.Linear(2, 2)))
    model.register_buffer("count", torch.tensor(1))
    names = [meta.name for meta in ModuleSource(compiled(model), buffers=True).metadata]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias", "count"]


def test_a_module_prefix_of_the_models_own_stays() -> None:
    outer = nn.ModuleDict({"module": nn.Linear(2, 2, bias=False)})
    assert [meta.name for meta in ModuleSource(outer).metadata] == ["module.weight"]


# State dicts


@given(state_dicts())
def test_any_state_dict_comes_through_bit_for_bit(state_dict: dict[str, Tensor]) -> None:
    source = StateDictSource(state_dict)
    for pairs in (source.iter_full(), source.iter_local()):
        found = list(checked(pairs, source.metadata))
        assert [meta for meta, _ in found] == source.metadata
        for meta, tensor in found:
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
            assert same_bits(tensor, state_dict[meta.name])
    names = list(state_dict)
    sent = [meta.name for meta in source.metadata]
    assert sent == [name for name in names if name in set(sent)]
    for name in set(names) - set(sent):
        twins = [state_dict[other] for other in sent if other != name]
        assert any(same_bits(state_dict[name], twin) for twin in twins)


def test_a_modules_state_dict_ties_as_the_module_does() -> None:
    module = Tied()
    names = {meta.name for meta in StateDictSource(module.state_dict).metadata}
    assert names == {meta.name for meta in ModuleSource(module, buffers=True).metadata}


BASE = torch.complex(torch.arange(6.0), torch.ones(6)).reshape(2, 3)
EMPTY = torch.zeros(0, 3)


@pytest.mark.parametrize(
    ("one", "other", "tied"),
    [
        (BASE, BASE, True),
        (BASE, BASE.detach(), True),
        (BASE, BASE.view(2, 3), True),
        (BASE, BASE.clone(), False),
        (BASE, BASE.conj(), False),
        (BASE.imag, BASE.conj().imag, False),
        (BASE, BASE.T, False),
        (BASE, BASE.view(3, 2), False),
        (BASE[0], BASE[1], False),
        (BASE, torch.view_as_real(BASE), False),
        (BASE.view(torch.int64), BASE.view(torch.float64), False),
        (EMPTY, EMPTY.detach(), True),
        (EMPTY, torch.zeros(0, 3), False),
        (torch.empty(2, device="meta"), torch.empty(2, device="meta"), False),
    ],
)
def test_tied_is_same_storage_place_and_type(one: Tensor, other: Tensor, tied: bool) -> None:
    names = [meta.name for meta in StateDictSource({"one": one, "other": other}).metadata]
    assert names == (["one"] if tied else ["one", "other"])


def test_a_callable_is_asked_for_every_pass() -> None:
    step = 0

    def state_dict() -> dict[str, Tensor]:
        nonlocal step
        step += 1
        return {"step": torch.tensor(step)}

    source = StateDictSource(state_dict)
    assert source.metadata == source.metadata == [ParamMeta("step", torch.int64, ())]
    assert [int(dict(source.iter_full())["step"]) for _ in range(2)] == [2, 3]


class Lazy(Mapping[str, Tensor]):
    """A checkpoint that makes each tensor when it is asked for; the freed memory is used again."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[str]:
        return (f"layer.{number}" for number in range(8))

    def __getitem__(self, name: str) -> Tensor:
        return torch.full((64,), float(name[-1]))


def test_tensors_that_are_freed_in_between_are_not_tied() -> None:
    source = StateDictSource(Lazy())
    values = []
    for _, tensor in source.iter_full():
        values.append(float(tensor[0]))
        del tensor
    assert values == [float(number) for number in range(8)]


@pytest.mark.parametrize("value", [None, 3, [1.0], nn.Linear(1, 1)])
def test_a_state_dict_holds_tensors_only(value: Any) -> None:
    with pytest.raises(MetadataError, match="'extra' is a .*, not a tensor"):
        _ = StateDictSource({"w": torch.zeros(1), "extra": value}).metadata


# Checking


def declared(pairs: Pairs) -> list[ParamMeta]:
    return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]


A, B, C = ("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(4))


@pytest.mark.parametrize(
    ("yielded", "parameter", "words", "before"),
    [
        ([B, A, C], "b", "'b' at index 0, where its metadata declares 'a'", 0),
        ([A, C], "c", "'c' at index 1, where its metadata declares 'b'", 1),
        ([A, B], "c", "ends at index 2, where its metadata declares 'c'", 2),
        ([], "a", "ends at index 0, where its metadata declares 'a': 0 of 3", 0),
        ([A, A, B, C], "a", "'a' at index 1 a second time, where its metadata declares 'b'", 1),
        ([A, B, C, ("d", torch.zeros(1))], "d", "'d' at index 3, after all that its metadata declares", 3),
        ([A, B, C, C], "c", "'c' at index 3 a second time, after all that its metadata declares", 3),
        ([A, ("b", torch.zeros(3, 1)), C], "b", r"index 1 as torch.float32 of shape \(3, 1\), and declares", 1),
        ([A, ("b", torch.zeros(3).half()), C], "b", "index 1 as torch.float16 of shape", 1),
        ([A, ("b", torch.zeros(3, device="meta")), C], "b", "index 1 as a .* on meta, which holds no bytes", 1),
        ([A, ("b", torch.zeros(3).to_sparse()), C], "b", "index 1 as a torch.sparse_coo tensor", 1),
        ([("a", [0.0, 0.0])], "a", "index 0 as a list, not a plain tensor", 0),
    ],
)
def test_the_first_divergence_is_named_before_it_is_yielded(
    yielded: Pairs, parameter: str, words: str, before: int
) -> None:
    seen: list[str] = []
    with pytest.raises(SourceMismatch, match=words) as raised:
        seen.extend(meta.name for meta, _ in checked(iter(yielded), declared([A, B, C])))
    assert raised.value.parameter == parameter
    assert raised.value.status == 400
    assert seen == ["a", "b", "c"][:before]


def test_pieces_are_checked_against_the_ranks_own_shape() -> None:
    described = ParamMeta("w", torch.float32, (10, 3), owners=(0, 1, 2, 3), placements=(layout.Shard(0),))
    assert len(list(checked([("w", torch.zeros(1, 3))], [described], local_rank=3))) == 1
    with pytest.raises(SourceMismatch, match=r"shape \(3, 3\), and declares torch.float32 of shape \(1, 3\)"):
        list(checked([("w", torch.zeros(3, 3))], [described], local_rank=3))


def test_a_source_that_raises_is_heard_in_its_own_words() -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield A
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        list(checked(broken(), declared([A, B])))


# Bytes


@given(tensors())
def test_bytes_are_a_view(tensor: Tensor) -> None:
    view = as_bytes(tensor)
    assert view.dtype == torch.uint8
    assert view.shape == (tensor.numel() * tensor.dtype.itemsize,)
    assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    assert (view.storage_offset(), view.stride()) == (0, (1,))


@given(odd_tensors())
def test_what_is_not_plain_bytes_is_refused(tensor: Tensor) -> None:
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        assert as_bytes(tensor).numel() == tensor.numel() * tensor.dtype.itemsize
    else:
        with pytest.raises(ValueError, match="is not plain bytes"):
            as_bytes(tensor)


def test_bytes_of_a_parameter_in_place() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    as_bytes(parameter).zero_()
    assert torch.equal(parameter.detach(), torch.zeros(2, 2))


# Strided shards


@given(st.data())
def test_cutting_order_undoes_split_factors(data: st.DataObject) -> None:
    mesh_shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    axes = range(len(mesh_shape))
    dims = [data.draw(st.sampled_from((None, 0, 1))) for _ in axes]
    order = data.draw(st.permutations(axes))
    native: list[Any] = []
    for axis in axes:
        before = [other for other in order[: order.index(axis)] if other > axis and dims[other] == dims[axis]]
        factor = torch.Size([mesh_shape[other] for other in before]).numel()
        dim = dims[axis]
        if dim is None:
            native.append(Replicate())
        else:
            native.append(_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
    found = cutting_order(native, mesh_shape)
    assert found is not None
    assert sorted(found) == list(axes)
    rows = data.draw(st.integers(0, 60))
    coordinates = [data.draw(st.integers(0, size - 1)) for size in mesh_shape]

    def pieces(sequence: list[int]) -> list[tuple[int, int]]:
        intervals = [(0, rows), (0, rows)]
        for axis in sequence:
            dim = dims[axis]
            if dim is not None:
                intervals[dim] = cut(intervals[dim], mesh_shape[axis], coordinates[axis])
        return intervals

    assert pieces(found) == pieces(list(order))


@pytest.mark.parametrize(
    ("native", "mesh_shape", "order"),
    [
        ([Shard(0), Shard(0)], (2, 2), [0, 1]),
        ([_StridedShard(0, split_factor=2), Shard(0)], (3, 2), [1, 0]),
        ([Replicate(), _StridedShard(0, split_factor=2), Shard(0)], (2, 2, 2), [0, 2, 1]),
        ([_StridedShard(0, split_factor=2), Shard(1)], (2, 2), None),
        ([_StridedShard(0, split_factor=3), Shard(0)], (2, 2), None),
        ([_StridedShard(0, split_factor=4), Shard(0), Shard(0)], (2, 2, 2), [1, 2, 0]),
        ([_StridedShard(0, split_factor=2), Shard(0), Shard(0)], (2, 2, 2), [1, 0, 2]),
        ([Partial()], (2,), None),
        ([Shard(0), Partial()], (2, 2), None),
    ],
)
def test_cutting_order(native: list[Any], mesh_shape: tuple[int, ...], order: list[int] | None) -> None:
    assert cutting_order(native, mesh_shape) == order
