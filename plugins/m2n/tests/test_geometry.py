from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plugins.m2n.tests.random_scenes import factored, random_view, region_of, strided
from weightwire.region import Region
from weightwire.region_boxes import merge_axes, row_major, whole
from weightwire.resharding.atoms import disjoint
from weightwire.resharding.geometry import geometry
from weightwire.resharding.source_layout import cells_of

randoms = st.randoms(use_true_random=False)


def stepped(random: Random, view: torch.Tensor) -> torch.Tensor:
    """Every so manyth of what a view has along each dimension, from somewhere on."""
    if not view.numel():
        return view
    return view[tuple(slice(random.randrange(min(size, 3)), None, random.randint(1, 3)) for size in view.shape)]


def merged(region: Region) -> tuple[Region, tuple[int, ...]]:
    """The region, and a contiguous target's strides, in the fewest axes, as recorded copies come."""
    sizes, strides, target = merge_axes(region.sizes, region.strides, row_major(region.sizes))
    return Region(region.offset, sizes, strides), target


def check_geometry(random: Random) -> None:
    """Every element that is wanted is in one piece of the cell that holds it, and is written where it belongs."""
    shape = tuple(random.randint(1, 9) for _ in range(random.randint(1, 3)))
    mesh = factored(random, random.randint(1, 8))
    cells = cells_of(shape, mesh, [random.randrange(len(shape)) for _ in mesh])
    views = [random_view(random, shape, random.randrange(2), 2) for _ in range(random.choice([1, 1, 1, 2, 3]))]
    regions = [region_of(stepped(random, view) if random.random() < 0.7 else view) for view in views]
    most = random.choice([1, 3, 1000])
    wanted = [merged(region) if random.random() < 0.7 else (region, row_major(region.sizes)) for region in regions]
    found = geometry(shape, cells, tuple(wanted), most)
    full = np.arange(math.prod(shape)).reshape(shape)
    written = [np.full(region.numel, -1) for region in regions]
    crossed: list[int] = []
    for cell, pieces in found.pieces.items():
        shard = np.ascontiguousarray(full[tuple(map(slice, cells.start[cell], cells.stop[cell]))]).reshape(-1)
        for piece in pieces:
            assert piece.contiguous or piece.numel <= most
            values = strided(shard, Region(piece.offset, piece.sizes, piece.strides))
            crossed += values.reshape(-1).tolist()
            for write in piece.writes:
                into = Region(write.offset, write.repeat_sizes + piece.sizes, write.repeat_strides + write.strides)
                target = strided(written[write.slot], into)
                assert (target == -1).all()
                target[...] = values
    assert len(crossed) == len(set(crossed)) == found.distinct
    for region, values in zip(regions, written, strict=True):
        expected = strided(full.reshape(-1), region) if region.numel else np.zeros(0, np.int64)
        assert values.tolist() == expected.reshape(-1).tolist()


@given(randoms)
def test_geometry_is_exact(random: Random) -> None:
    check_geometry(random)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_geometry_is_exact_often() -> None:
    random = Random(5)
    for _ in range(4000):
        check_geometry(random)


def test_a_transposed_demand_is_sent_as_it_lies() -> None:
    """The sender's piece stays contiguous; the receiver does the transposing."""
    cells = cells_of((6, 4), (3,), (0,))
    found = geometry((6, 4), cells, ((Region(0, (4, 6), (1, 4)), (6, 1)),), 100)
    assert [[(piece.sizes, piece.strides) for piece in pieces] for pieces in found.pieces.values()] == [
        [((2, 4), (4, 1))]
    ] * 3
    assert found.pieces[1][0].writes[0][1:3] == (2, (1, 6))


def test_apart_is_left_alone() -> None:
    """Interleaved columns overlap nowhere, and stay one region each."""
    even, odd = Region(0, (4, 3), (6, 2)), Region(1, (4, 3), (6, 2))
    atoms = disjoint([(even, whole((4, 3))), (odd, whole((4, 3)))], (4, 6))
    assert [atom.region for atom in atoms] == [even, odd]


def test_atoms_of_regions_that_overlap() -> None:
    rows, columns = Region(0, (2, 6), (6, 1)), Region(0, (4, 3), (6, 1))
    atoms = disjoint([(rows, whole((2, 6))), (columns, whole((4, 3)))], (4, 6))
    assert {(atom.region.offset, atom.region.numel, tuple(link.slot for link in atom.links)) for atom in atoms} == {
        (0, 6, (0, 1)),
        (3, 6, (0,)),
        (12, 6, (1,)),
    }


def test_an_atom_ends_where_what_it_is_linked_to_bends() -> None:
    """One demand reads 0 3 1 4 2 5, the other 1 2 3 4: equal steps on one side are unequal ones on the other."""
    transposed, middle = (Region(0, (3, 2), (1, 3)), whole((3, 2))), (Region(1, (4,), (1,)), whole((4,)))
    read = [0, 3, 1, 4, 2, 5], [1, 2, 3, 4]
    crossed = []
    for atom in disjoint([transposed, middle], (6,)):
        elements = strided(np.arange(6), atom.region).reshape(-1).tolist()
        crossed += elements
        for link in atom.links:
            places = strided(np.arange(6), link.region).reshape(-1).tolist()
            assert [read[link.slot][place] for place in places] == elements
    assert sorted(crossed) == list(range(6))
