from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightwire.errors import MetadataError
from weightwire.layout import (
    Box,
    ParamMeta,
    Replicate,
    Shard,
    check_metadata,
    cut,
    dtype_from_name,
    dtype_name,
    layerwise_groups,
    metadata_digest,
)
from weightwire.testing.strategies import DTYPES, dtypes, metadata_lists, param_metas, shapes


def meta(shape: tuple[int, ...] = (4, 6), **layout: Any) -> ParamMeta:
    return ParamMeta("w", torch.float32, shape, **layout)


def numbered(shape: tuple[int, ...]) -> Tensor:
    """A tensor whose elements are their own flat index."""
    return torch.arange(math.prod(shape)).reshape(shape)


def coordinates(described: ParamMeta, rank: int) -> tuple[int, ...]:
    assert described.owners is not None
    assert described.mesh_shape is not None
    grid = torch.tensor(described.owners).reshape(described.mesh_shape)
    return tuple(int(index) for index in (grid == rank).nonzero()[0])


def chunked(described: ParamMeta, rank: int) -> Tensor:
    """The piece of a rank by `torch.chunk` itself, one mesh axis after the other."""
    piece = numbered(described.shape)
    if described.placements is None or described.mesh_shape is None:
        return piece
    for size, placement, index in zip(
        described.mesh_shape, described.placements, coordinates(described, rank), strict=True
    ):
        if isinstance(placement, Shard):
            chunks = piece.chunk(size, dim=placement.dim)
            piece = chunks[index] if index < len(chunks) else piece.narrow(placement.dim, 0, 0)
    return piece


# Boxes


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 12))
def test_cut_is_chunk(start: int, size: int, parts: int) -> None:
    pieces = [cut((start, start + size), parts, index) for index in range(parts)]
    expected = [(int(c[0]), int(c[-1]) + 1) for c in torch.arange(start, start + size).chunk(parts) if len(c)]
    assert [piece for piece in pieces if piece[0] < piece[1]] == expected
    assert all(piece == (start + size, start + size) for piece in pieces[len(expected) :])


@pytest.mark.parametrize(("rows", "expected"), [(10, [3, 3, 3, 1]), (5, [2, 2, 1, 0]), (1, [1, 0, 0, 0])])
def test_uneven_rows(rows: int, expected: list[int]) -> None:
    described = meta((rows, 3), owners=(0, 1, 2, 3), placements=(Shard(0),))
    assert [described.local_shape(rank) for rank in range(4)] == [(size, 3) for size in expected]


@given(param_metas())
def test_box_is_nested_chunk(described: ParamMeta) -> None:
    for rank in described.owners or (0, 7):
        piece = chunked(described, rank)
        box = described.box(rank)
        assert described.local_shape(rank) == piece.shape
        assert box.numel == piece.numel()
        assert box.empty == (piece.numel() == 0)
        if not box.empty:
            assert box.shape == piece.shape
            assert torch.equal(numbered(described.shape)[box.slices()], piece)


@given(param_metas(sharded=True))
def test_cells_partition_the_tensor(described: ParamMeta) -> None:
    assert described.owners is not None
    cells = {described.box(rank) for rank in described.owners} - {
        Box((0,) * len(described.shape), (0,) * len(described.shape))
    }
    count = torch.zeros(described.shape, dtype=torch.int)
    for cell in cells:
        count[cell.slices()] += 1
    assert bool((count == 1).all())


@given(param_metas(sharded=True))
def test_owners_that_differ_on_replicated_axes_only_hold_one_box(described: ParamMeta) -> None:
    assert described.owners is not None
    assert described.placements is not None
    groups = defaultdict(set)
    for rank in described.owners:
        where = coordinates(described, rank)
        key = tuple(i for i, placement in zip(where, described.placements, strict=True) if isinstance(placement, Shard))
        groups[key].add(described.box(rank))
    assert all(len(boxes) == 1 for boxes in groups.values())


def test_axes_that_shard_one_dim_cut_outer_first() -> None:
    described = meta((10,), owners=(0, 1, 2, 3), mesh_shape=(2, 2), placements=(Shard(0), Shard(0)))
    assert [described.box(rank) for rank in range(4)] == [
        Box((0,), (3,)),
        Box((3,), (5,)),
        Box((5,), (8,)),
        Box((8,), (10,)),
    ]


def test_owners_come_in_mesh_order() -> None:
    described = meta((4,), owners=(7, 2), placements=(Shard(0),))
    assert described.box(7) == Box((0,), (2,))
    assert described.box(2) == Box((2,), (4,))
    assert described.first_owner == 7
    with pytest.raises(MetadataError, match="'w' is not owned by trainer rank 0"):
        described.box(0)


def test_without_placements_every_owner_holds_all() -> None:
    whole = Box((0, 0), (4, 6))
    assert meta().box(99) == whole
    assert meta().owned_by(99)
    assert meta().first_owner == 0
    assert meta(owners=(3, 1)).box(1) == whole
    assert not meta(owners=(3, 1)).owned_by(2)


def test_zero_dimensional() -> None:
    described = meta(())
    assert described.box(0) == Box((), ())
    assert (described.numel, described.nbytes, described.box(0).numel) == (1, 4, 1)
    assert not described.box(0).empty
    assert torch.tensor(3)[described.box(0).slices()] == 3


def test_empty_boxes_are_equal() -> None:
    assert Box((2, 0), (2, 5)) == Box((1, 4), (3, 4)) == Box((0, 0), (0, 0))
    assert len({Box((2, 0), (2, 5)), Box((0, 0), (0, 0))}) == 1


@pytest.mark.parametrize(("start", "stop"), [((1,), (0,)), ((-1,), (2,)), ((0,), (1, 1))])
def test_no_such_box(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    with pytest.raises(MetadataError, match="no box"):
        Box(start, stop)


@given(st.data(), shapes())
def test_intersection(data: st.DataObject, shape: tuple[int, ...]) -> None:
    def some_box() -> Box:
        bounds = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))

    one, other = some_box(), some_box()
    elements = numbered(shape)
    both = one.intersect(other)
    assert both == other.intersect(one)
    assert both.intersect(one) == both

    def inside(box: Box) -> set[int]:
        return set(elements[box.slices()].reshape(-1).tolist())

    assert inside(both) == inside(one) & inside(other)


# Validation


@pytest.mark.parametrize("shape", [(-1,), (True,), (2.0,), ("2",), 3, None, {1, 2}, torch.zeros(2)])
def test_refused_shapes(shape: Any) -> None:
    with pytest.raises(MetadataError, match="'w' shape"):
        meta(shape)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"mesh_shape": (2,)}, "without owners"),
        ({"placements": (Replicate(),)}, "without owners"),
        ({"owners": ()}, "distinct non-negative"),
        ({"owners": (0, 0)}, "distinct non-negative"),
        ({"owners": (-1,)}, "owners must be"),
        ({"owners": (True,)}, "owners must be"),
        ({"owners": 1}, "owners must be"),
        ({"owners": (0, 1), "mesh_shape": (3,)}, "does not cover its 2 owners"),
        ({"owners": (0, 1), "mesh_shape": (2, 0)}, "mesh_shape must be"),
        ({"owners": (0, 1), "mesh_shape": (2, True)}, "mesh_shape must be"),
        ({"owners": (0, 1), "placements": (Shard(0), Shard(0))}, "2 placements for a 1-D mesh"),
        ({"owners": (0, 1), "placements": (Shard(2),)}, "shards dim 2 of a 2-D tensor"),
        ({"owners": (0, 1), "placements": (Shard(-1),)}, "shards dim -1"),
        ({"owners": (0, 1), "placements": (Shard(True),)}, "shards dim True"),
    ],
)
def test_refused_layouts(layout: dict[str, Any], words: str) -> None:
    with pytest.raises(MetadataError, match=words) as raised:
        meta(**layout)
    assert raised.value.parameter == "w"


def test_a_scalar_cannot_be_sharded() -> None:
    with pytest.raises(MetadataError, match="shards dim 0 of a 0-D tensor"):
        meta((), owners=(0, 1), placements=(Shard(0),))


def test_a_placement_of_another_kind_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="neither Replicate nor Shard"):
        meta(owners=(0, 1), placements=("Shard(0)",))


@pytest.mark.parametrize("name", ["", None, 3])
def test_refused_names(name: Any) -> None:
    with pytest.raises(MetadataError, match="name must be"):
        ParamMeta(name, torch.float32, (1,))


def test_refused_dtype() -> None:
    with pytest.raises(MetadataError, match="'w' dtype"):
        ParamMeta("w", "float32", (1,))  # type: ignore[arg-type]


def test_what_means_the_same_is_equal() -> None:
    assert meta(torch.Size([4, 6])) == meta([4, 6]) == meta()  # type: ignore[arg-type]
    assert meta(owners=[0, 1]) == meta(owners=(0, 1), mesh_shape=(2,), placements=(Replicate(),))
    assert hash(meta(owners=[0, 1])) == hash(meta(owners=(0, 1)))


# JSON and digest


@given(param_metas())
def test_json_round_trip(described: ParamMeta) -> None:
    again = ParamMeta.from_json(json.loads(json.dumps(described.to_json())))
    assert again == described
    assert again.box(again.first_owner) == described.box(described.first_owner)


GOOD = {"name": "w", "dtype": "int8", "shape": [2, 3], "owners": [0, 1], "mesh_shape": [2, 1], "placements": [1, None]}


def test_json_form() -> None:
    described = ParamMeta("w", torch.int8, (2, 3), owners=(0, 1), mesh_shape=(2, 1), placements=(Shard(1), Replicate()))
    assert described.to_json() == GOOD
    assert ParamMeta("w", torch.int8, ()).to_json() == {"name": "w", "dtype": "int8", "shape": []}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 4}, r"unknown keys \['size'\]"),
        ({"dtype": "int7.5"}, "'w': this torch .* has no dtype 'int7.5'"),
        ({"dtype": ["int8"]}, "has no dtype"),
        ({"dtype": "load"}, "has no dtype 'load'"),
        ({"name": 3}, "name must be"),
        ({"shape": 6}, "shape must be a list"),
        ({"shape": "23"}, "shape must be a list"),
        ({"shape": [2.0, 3]}, "shape must be a sequence of integers"),
        ({"owners": None}, "owners must be a list"),
        ({"placements": [1, "x"]}, "shards dim 'x'"),
        ({"placements": [1, True]}, "shards dim True"),
        ({"placements": [2, None]}, "shards dim 2"),
    ],
)
def test_json_is_strict(change: dict[str, Any], words: str) -> None:
    with pytest.raises(MetadataError, match=words):
        ParamMeta.from_json(GOOD | change)


@pytest.mark.parametrize("key", ["name", "dtype", "shape"])
def test_json_needs(key: str) -> None:
    with pytest.raises(MetadataError, match=rf"missing keys \['{key}'\]"):
        ParamMeta.from_json({k: v for k, v in GOOD.items() if k != key})


def test_json_needs_an_object() -> None:
    with pytest.raises(MetadataError, match="must be an object"):
        ParamMeta.from_json([])  # type: ignore[arg-type]


@given(metadata_lists())
def test_digest_depends_on_order_and_content(metadata: list[ParamMeta]) -> None:
    digest = metadata_digest(metadata)
    assert digest == metadata_digest([ParamMeta.from_json(item.to_json()) for item in metadata])
    if len(metadata) > 1:
        assert digest != metadata_digest(metadata[::-1])
        assert digest != metadata_digest(metadata[:-1])


CANONICAL = (
    '[{"dtype":"bfloat16","name":"model.embed","shape":[10,4]},'
    '{"dtype":"float32","mesh_shape":[2],"name":"model.0.w","owners":[2,0],"placements":[0],"shape":[5,3]}]'
)
DECLARED = """
import torch
from weightwire.layout import ParamMeta, Shard, metadata_digest
print(metadata_digest([
    ParamMeta("model.embed", torch.bfloat16, (10, 4)),
    ParamMeta("model.0.w", torch.float32, (5, 3), owners=(2, 0), placements=(Shard(0),)),
]))
"""


def test_digest_is_the_same_in_another_process() -> None:
    other = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DECLARED],
        env=os.environ | {"PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert other.stdout.strip() == hashlib.sha256(CANONICAL.encode()).hexdigest()


def test_duplicate_names_are_refused() -> None:
    check_metadata([])
    with pytest.raises(MetadataError, match="'w' is declared twice, at index 0 and index 2"):
        check_metadata([meta(), ParamMeta("v", torch.int8, ()), meta()])
    with pytest.raises(MetadataError, match="index 1 is a str"):
        check_metadata([meta(), "w"])  # type: ignore[list-item]


# Names of dtypes and layers


@given(dtypes())
def test_dtype_names(dtype: torch.dtype) -> None:
    assert dtype_from_name(dtype_name(dtype)) is dtype


def test_dtype_names_are_the_canonical_ones() -> None:
    assert dtype_name(torch.half) == "float16"
    assert len({dtype_name(dtype) for dtype in DTYPES}) == len(DTYPES)
    for name in ("half", "torch.float16", "", None, 3):
        with pytest.raises(MetadataError, match="has no dtype"):
            dtype_from_name(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        ([], []),
        (["a", "b.c"], [["a", "b.c"]]),
        (
            ["embed", "layers.1.w", "norm", "layers.0.w", "layers.1.b", "head"],
            [["embed"], ["layers.0.w"], ["layers.1.w", "layers.1.b"], ["norm", "head"]],
        ),
        (["layers.10.w", "layers.9.w"], [["layers.9.w"], ["layers.10.w"]]),
        (
            ["vision.1.w", "text.0.w", "vision.0.w"],
            [["vision.0.w"], ["vision.1.w"], ["text.0.w"]],
        ),
        (["layers.0.experts.1.w", "layers.0.experts.0.w"], [["layers.0.experts.1.w", "layers.0.experts.0.w"]]),
        (["0.w", "a²b.w", "x.²"], [["0.w"], ["a²b.w", "x.²"]]),
        (["l.01.w", "l.1.b"], [["l.01.w", "l.1.b"]]),
    ],
)
def test_layerwise_groups(names: list[str], groups: list[list[str]]) -> None:
    assert layerwise_groups(names) == groups
    assert layerwise_groups(iter(names)) == groups


@given(metadata_lists(max_size=8))
def test_layerwise_groups_lose_nothing(metadata: list[ParamMeta]) -> None:
    names = [item.name for item in metadata]
    groups = layerwise_groups(names)
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert all(groups)
