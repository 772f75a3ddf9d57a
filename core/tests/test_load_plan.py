"""Plans as values: normal forms, JSON, digest, and which writes count."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import MessageError
from weightwire.layout import ParamMeta
from weightwire.load_plan import Copy, Fill, LoadPlan, Opaque, Target, View, last_element, normal_pair, once, repeated
from weightwire.plan_assembly import in_units
from weightwire.region import Region
from weightwire.shadowing import Write, settle, union_size

AXES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), max_size=3)


def region(offset: int, axes: list[tuple[int, int]]) -> Region:
    return Region(offset, tuple(size for size, _ in axes), tuple(stride for _, stride in axes))


def elements(one: Region) -> list[int]:
    flat = torch.arange(last_element(one) + 1)
    return flat.as_strided(one.sizes, one.strides, one.offset).reshape(-1).tolist()


REGIONS = st.builds(region, st.integers(0, 5), AXES)


def plan(**changes: Any) -> LoadPlan:
    fields: dict[str, Any] = {
        "sources": (
            ParamMeta("a", torch.bfloat16, (4, 6)),
            ParamMeta("b", torch.int8, ()),
            ParamMeta("c", torch.int8, (3,)),
        ),
        "targets": (
            Target("x.w", torch.bfloat16, 24, (View("x.w", 0, (6, 4), (4, 1)), View("y.w", 0, (6, 4), (4, 1)))),
            Target("x.s", torch.int8, 5, (View("x.s", 1, (), ()),)),
        ),
        "copies": (
            Copy("a", Region(0, (6, 4), (1, 6)), "x.w", Region(0, (6, 4), (4, 1))),
            Copy("b", Region(0, (), ()), "x.s", Region(1, (), ())),
        ),
        "fills": (Fill("x.w", Region(20, (2,), (1,)), "803f"),),
        "opaque": (Opaque("z", "a cast", ("c",)),),
        "shadowed": (("a", Region(3, (2,), (6,))),),
        "unmoved": ("b",),
        "unfilled": (("x.s", 4),),
    }
    return LoadPlan(**(fields | changes))


@given(REGIONS, st.data())
def test_the_normal_form_pairs_the_same_elements(source: Region, data: st.DataObject) -> None:
    strides = data.draw(st.tuples(*(st.integers(0, 9) for _ in source.sizes)))
    target = Region(data.draw(st.integers(0, 5)), source.sizes, strides)
    first, second = normal_pair(source, target)
    assert first.sizes == second.sizes
    assert 1 not in first.sizes
    assert (elements(first), elements(second)) == (elements(source), elements(target))
    assert normal_pair(first, second) == (first, second)


def test_contiguous_copies_have_one_axis() -> None:
    whole = Region(8, (2, 3, 4), (12, 4, 1))
    assert normal_pair(whole, Region(0, (2, 3, 4), (12, 4, 1))) == (Region(8, (24,), (1,)), Region(0, (24,), (1,)))
    assert normal_pair(whole, Region(0, (2, 3, 4), (40, 4, 1)))[1] == Region(0, (2, 12), (40, 1))


@given(REGIONS)
def test_pieces_hold_each_element_once(one: Region) -> None:
    piece = once(one)
    assert 0 not in piece.strides
    assert piece.numel == math.prod(size for size, stride in zip(one.sizes, one.strides, strict=True) if stride)
    held = torch.tensor(elements(piece))
    assert held.as_strided(one.sizes, repeated(one)).reshape(-1).tolist() == elements(one)
    assert once(piece) == piece


@given(REGIONS, st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4)))
def test_regions_in_other_units(one: Region, have: int, want: int) -> None:
    def in_bytes(one: Region, size: int) -> list[int]:
        return [index * size + byte for index in elements(one) for byte in range(size)]

    other = in_units(one, have, want)
    if other is not None:
        assert in_bytes(other, want) == in_bytes(one, have)
    else:
        assert have < want


@given(st.lists(st.tuples(REGIONS, st.booleans()), max_size=4))
def test_which_writes_count(drawn: list[tuple[Region, bool]]) -> None:
    """Constants first and then the copies, in any order, give what the writes in their order give."""
    writes = [Write(one, constant) for one, constant in drawn]
    settle(writes)
    inner = [len(set(elements(write.region))) < write.region.numel for write in writes]
    if any(write.tangled for write in writes):
        return
    assert not any(twice for twice, write in zip(inner, writes, strict=True) if not write.shadowed)
    size = max((last_element(write.region) for write in writes), default=0) + 1
    expected, got = torch.full((size,), -1), torch.full((size,), -1)
    for index, write in enumerate(writes):
        expected[elements(write.region)] = index
    constants = [index for index, write in enumerate(writes) if write.constant and not write.shadowed]
    copies = [index for index, write in enumerate(writes) if not write.constant and not write.shadowed]
    for index in (*constants, *reversed(copies)):
        got[elements(writes[index].region)] = index
    assert torch.equal(expected, got)


@given(st.lists(REGIONS.filter(lambda one: len(set(elements(one))) == one.numel), max_size=4))
def test_union(regions: list[Region]) -> None:
    assert union_size(regions) == len({element for one in regions for element in elements(one)})


def test_huge_regions_are_settled_without_looking_at_elements() -> None:
    half = 1 << 40
    rows = [Write(Region(row * half, (half,), (1,))) for row in range(4)]
    again = Write(Region(half, (half,), (1,)))
    settle([*rows, again])
    assert [write.shadowed for write in rows] == [False, True, False, False]
    assert not again.tangled
    columns = [Write(Region(start, (half, 2), (4, 1))) for start in (0, 2)]
    settle(columns)
    assert all(write.tangled for write in columns)  # too many runs to tell


def test_json_round_trip() -> None:
    one = plan()
    text = one.to_json()
    again = LoadPlan.from_json(text)
    assert again == one
    assert again.to_json() == text
    assert again.digest() == one.digest() != plan(fills=()).digest()
    assert one.full_sources == ("c",)
    assert one.opaque_bytes == 3
    assert one.pieces == (("a", Region(0, (6, 4), (1, 6))), ("b", Region(0, (), ())))
    assert one.piece_bytes == 49
    json.dumps(one.describe())
    assert LoadPlan.from_json(LoadPlan(()).to_json()) == LoadPlan(())


def test_equal_axes_are_written_once() -> None:
    sources = tuple(ParamMeta(f"w{index}", torch.int8, (8, 8)) for index in range(100))
    targets = tuple(
        Target(f"t{index}", torch.int8, 64, (View(f"t{index}", 0, (8, 8), (8, 1)),)) for index in range(100)
    )
    piece = Region(4, (8, 4), (8, 1))
    copies = tuple(Copy(f"w{index}", piece, f"t{index}", piece) for index in range(100))
    record = json.loads(
        plan(
            sources=sources, targets=targets, copies=copies, fills=(), opaque=(), shadowed=(), unmoved=(), unfilled=()
        ).to_json()
    )
    assert record["axes"] == [[[8, 4], [8, 1], [8, 1]]]


BAD: dict[str, Any] = {
    "no object": lambda record: [],
    "missing key": lambda record: {key: value for key, value in record.items() if key != "axes"},
    "unknown key": lambda record: record | {"more": 1},
    "version": lambda record: record | {"version": 2},
    "dtype": lambda record: record | {"sources": [["a", "float7", [4, 6]], *record["sources"][1:]]},
    "name twice": lambda record: record | {"sources": [record["sources"][0], *record["sources"]]},
    "no view": lambda record: record | {"targets": [[1, "int8", []]]},
    "number": lambda record: record | {"unmoved": [True]},
    "index": lambda record: record | {"unmoved": [3]},
    "negative index": lambda record: record | {"unmoved": [-1]},
    "out of the source": lambda record: record | {"copies": [[0, 1, *record["copies"][0][2:]]]},
    "out of the target": lambda record: record | {"copies": [[*record["copies"][0][:3], 1, 0]]},
    "other element size": lambda record: record | {"copies": [[0, 0, 1, 0, 1]]},
    "bits": lambda record: record | {"fills": [[0, 0, [1], [1], "80"]]},
    "no hex": lambda record: record | {"fills": [[0, 0, [1], [1], "zz00"]]},
    "short row": lambda record: record | {"copies": [[0, 0]]},
    "sizes": lambda record: record | {"shadowed": [[0, 0, [1, 2], [1]]]},
    "empty region": lambda record: record | {"shadowed": [[0, 0, [0], [1]]]},
    "reason": lambda record: record | {"opaque": [["z", None, []]]},
}


@pytest.mark.parametrize("fault", BAD)
def test_json_that_is_refused(fault: str) -> None:
    with pytest.raises(MessageError, match="Invalid load plan"):
        LoadPlan.from_json(json.dumps(BAD[fault](json.loads(plan().to_json()))))


def test_no_json() -> None:
    with pytest.raises(MessageError, match="no JSON"):
        LoadPlan.from_json("{")
