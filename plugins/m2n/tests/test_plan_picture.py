from __future__ import annotations

import struct
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.m2n.tests.plan_scenes import load_plans, run, split, write
from plugins.m2n.tests.random_scenes import random_scene
from weightwire.region import Region
from weightwire.resharding.demands import Demand, Workers
from weightwire.resharding.planner import Plan
from weightwire.resharding.source_layout import SourceLayout, cells_of
from weightwire_m2n.messages import M2NTrainerInitInfo
from weightwire_m2n.parameter_raster import Projection, cells_at, contains, most_telling, readers, share_read
from weightwire_m2n.plan_picture import draw
from weightwire_m2n.plan_report import report
from weightwire_m2n.planning import make_plan


def picture(path: Path) -> Any:
    from matplotlib.image import imread

    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", path.read_bytes()[16:24]) == (1540, 825)
    return imread(path)


def test_pictures_show_what_differs(tmp_path: Path) -> None:
    scenes = [split(4, 64, 64, 2), split(4, 64, 64, 4), split(1, 64, 64, 1)]
    seen = []
    for number, scene in enumerate(scenes):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, scene)
        assert run(folder, "--png", folder / "plan.png", "--parameter", "layer.weight")[0] == 0
        seen.append(picture(folder / "plan.png"))
        assert len(np.unique(seen[-1])) > 50
    for index, one in enumerate(seen):
        assert all((one != other).any() for other in seen[:index])


def test_what_is_drawn_by_default() -> None:
    def layout(name: str, rows: int, *, cut: bool) -> SourceLayout:
        return SourceLayout(name, (rows, 2), 4, (0, 1), (2,), (0,) if cut else None)

    def wanted(index: int, rows: int) -> Demand:
        return Demand(index, Region(0, (rows * 2,), (1,)), 0, Region(0, (rows * 2,), (1,)))

    whole, cut = layout("whole", 9, cut=False), layout("cut", 4, cut=True)
    every = Workers.of([[wanted(0, 9), wanted(1, 4)]])
    assert most_telling(Plan([whole, cut], 2, every)) == 1
    assert most_telling(Plan([whole, cut], 2, Workers.of([[wanted(0, 8), wanted(1, 4)]]))) == 0
    assert most_telling(Plan([whole, whole], 2, Workers.of([[wanted(0, 9), wanted(1, 9)]]))) == 0
    assert most_telling(Plan([layout("none", 0, cut=True)], 2, Workers.of([[]]))) is None


@given(st.randoms(use_true_random=False))
@settings(max_examples=3, deadline=None)
def test_whatever_can_be_planned_can_be_drawn(random: Random) -> None:
    scene = random_scene(random)
    plan = make_plan(scene.metadata, scene.trainers, load_plans(scene), M2NTrainerInitInfo())
    with TemporaryDirectory() as name:
        draw(Path(name) / "x.png", plan, report(plan, load_plans(scene), speed=1, planning_seconds=0))
        picture(Path(name) / "x.png")


@given(st.randoms(use_true_random=False))
def test_the_pixels_of_a_small_tensor_are_its_elements(random: Random) -> None:
    scene = random_scene(random)
    plan = make_plan(scene.metadata, scene.trainers, load_plans(scene), M2NTrainerInitInfo())
    for index, meta in enumerate(scene.metadata):
        cells = plan.instances[index].of.cells
        projection = Projection.of(meta.shape, cells)
        if not meta.numel or max(projection.extents) > 200:
            continue
        (positions,) = projection.samples()
        assert (positions.reshape(-1) == np.arange(meta.numel)).all()
        owners = cells_at(positions, meta.shape, cells).reshape(meta.shape)
        for rank in range(scene.trainers):
            if meta.owned_by(rank) and not meta.box(rank).empty:
                held = owners[meta.box(rank).slices()]
                assert (held == held.flat[0]).all()
                assert (owners == held.flat[0]).sum() == held.size
                assert rank in plan.instances[index].groups[held.flat[0]]
        shown: dict[int, Any] = {}
        for regions, ranks in readers(plan, index).items():
            shown |= dict.fromkeys(ranks, share_read(regions, [positions]).reshape(-1))
        for worker, demands in enumerate(scene.demands):
            read = np.zeros(meta.numel)
            for demand in demands:
                if demand.parameter == index and demand.source.numel:
                    region = demand.source
                    read[torch.arange(meta.numel).as_strided(region.sizes, region.strides, region.offset).numpy()] = 1
            assert (shown.get(worker, np.zeros(meta.numel)) == read).all()


AXES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4)


@given(st.integers(0, 5), AXES)
def test_which_positions_a_region_reads(offset: int, axes: list[tuple[int, int]]) -> None:
    region = Region(offset, tuple(size for size, _ in axes), tuple(stride for _, stride in axes))
    expected = np.zeros(150, np.bool_)
    expected[torch.arange(150).as_strided(region.sizes, region.strides, offset).numpy()] = True
    assert (contains(region, np.arange(150)) == expected).all()


def test_regions_with_huge_axes_are_looked_at_by_their_strides() -> None:
    size = 1 << 40
    assert contains(Region(1, (size, 3), (1, 1)), np.array([0, 1, size + 2, size + 3])).tolist() == [0, 1, 1, 0]


def test_a_large_tensor_is_sampled() -> None:
    cells = cells_of((4096, 8, 1024), (8,), (1,))
    projection = Projection.of((4096, 8, 1024), cells)
    assert projection.extents == (4096, 8192)
    samples = projection.samples()
    assert len(samples) > 1
    assert all(each.shape == samples[0].shape and each.max() < 4096 * 8192 for each in samples)
    owners = cells_at(samples[0], projection.shape, cells)
    assert (np.diff(owners, axis=1) >= 0).all()
    assert len(np.unique(owners)) == 8
    half = share_read([Region(0, (4096, 4096), (8192, 2))], samples)
    assert 0.45 < half.mean() < 0.55
    assert share_read([Region(0, (4096 * 8192,), (1,))], samples).min() == 1


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, split(2, 4, 4, 2))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = run(tmp_path, "--png", tmp_path / "plan.png")
    assert (status, out) == (2, "")
    assert err == "weightwire plan: a picture needs matplotlib: pip install 'weightwire-m2n[plot]'\n"
    assert run(tmp_path)[0] == 0
