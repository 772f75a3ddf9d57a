from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire.layout import ParamMeta
from weightwire.stock_packing import (
    cut_packs,
    pack,
    packed_broadcast_consumer,
    packed_broadcast_producer,
    unpack,
)

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.bool, torch.int16]
Pair = tuple[str, torch.Tensor]


@pytest.mark.parametrize(
    ("sizes", "packs"),
    [
        ([40, 60, 1, 100, 5, 300, 5], [[40, 60, 1], [100, 5], [300], [5]]),
        ([50, 50], [[50, 50]]),
        ([50, 50, 0, 0], [[50, 50, 0, 0]]),
        ([101], [[101]]),
        ([0], [[0]]),
        ([], []),
    ],
    ids=str,
)
def test_the_cut_rule_at_a_limit_of_100(sizes: list[int], packs: list[list[int]]) -> None:
    assert [[sizes[place] for place in places] for places in cut_packs(sizes, 100)] == packs


def test_numbers_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="-1"):
        cut_packs([1], -1)
    with pytest.raises(ValueError, match="-2"):
        cut_packs([1, -2], 1)


@st.composite
def models(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES) -> list[Pair]:
    pairs = []
    for number in range(draw(st.integers(0, 10))):
        dtype = draw(st.sampled_from(dtypes))
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
        pairs.append((f"p{number}", raw.view(dtype).view(shape)))
    return pairs


def metadata_of(pairs: list[Pair]) -> list[ParamMeta]:
    return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]


def same(one: Pair, other: Pair) -> bool:
    flat = [tensor.reshape(-1).view(torch.uint8) for _, tensor in (one, other)]
    kinds = [(name, tensor.dtype, tensor.shape) for name, tensor in (one, other)]
    return kinds[0] == kinds[1] and torch.equal(*flat)


@given(model=models(), offset=st.integers(0, 9))
def test_pack_and_unpack_at_any_alignment(model: list[Pair], offset: int) -> None:
    packed = pack([tensor for _, tensor in model])
    buffer = torch.empty(offset + packed.numel(), dtype=torch.uint8)[offset:].copy_(packed)
    unpacked = unpack(buffer, metadata_of(model))
    assert len(unpacked) == len(model)
    assert all(same(*pairs) for pairs in zip(unpacked, model, strict=True))


def test_what_upstream_cannot_unpack() -> None:
    model = [("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.arange(3, dtype=torch.float32))]
    unpacked = unpack(pack([tensor for _, tensor in model]), metadata_of(model))
    assert all(same(*pairs) for pairs in zip(unpacked, model, strict=True))


def test_pack_takes_views_and_leaves_no_padding() -> None:
    matrix = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    packed = pack([matrix.t(), torch.tensor(7, dtype=torch.uint8)])
    assert packed.tolist() == [0, 0, 3, 0, 1, 0, 4, 0, 2, 0, 5, 0, 7]


@pytest.mark.parametrize("length", [11, 13])
def test_a_pack_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="have 12"):
        unpack(torch.zeros(length, dtype=torch.uint8), [ParamMeta("a", torch.float32, (3,))])


@given(model=models(), limit=st.integers(0, 400))
def test_consumer_reproduces_what_producer_sent(model: list[Pair], limit: int) -> None:
    wire: list[torch.Tensor] = []
    packed_broadcast_producer(model, lambda buffer: wire.append(buffer.clone()), buffer_size_bytes=limit)
    metadata = metadata_of(model)
    packs = cut_packs([meta.nbytes for meta in metadata], limit)
    assert [buffer.numel() for buffer in wire] == [sum(metadata[place].nbytes for place in pack) for pack in packs]
    arriving, loads = iter(wire), list[list[Pair]]()

    def broadcast(buffer: torch.Tensor) -> None:
        buffer.copy_(next(arriving))

    packed_broadcast_consumer(metadata, broadcast, loads.append, buffer_size_bytes=limit)
    assert [len(pairs) for pairs in loads] == [len(pack) for pack in packs]
    received = [pair for pairs in loads for pair in pairs]
    assert all(same(*pairs) for pairs in zip(received, model, strict=True))


def test_a_tensor_over_the_limit_goes_whole() -> None:
    wire: list[int] = []
    model = [("a", torch.zeros(10)), ("b", torch.zeros(1000)), ("c", torch.zeros(10))]
    packed_broadcast_producer(model, lambda buffer: wire.append(buffer.numel()), buffer_size_bytes=100)
    assert wire == [4040, 40]


def test_nothing_is_sent_for_nothing() -> None:
    seen: list[object] = []
    packed_broadcast_producer([], seen.append, buffer_size_bytes=100)
    packed_broadcast_consumer([], seen.append, seen.append, buffer_size_bytes=100)
    assert seen == []
