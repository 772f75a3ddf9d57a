"""Random scenes as what trainers and workers leave in files."""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from pathlib import Path

import torch

from plugins.m2n.tests.random_scenes import Scene
from weightwire.layout import ParamMeta, Shard
from weightwire.load_plan import Copy, LoadPlan, Target, View, last_element
from weightwire.region import Region
from weightwire.resharding.demands import Demand
from weightwire_m2n.layout_files import SOURCE_FILE, WORKERS_FILE, write_source_layout, write_worker_layouts
from weightwire_m2n.plan_command import main

BYTES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def load_plans(scene: Scene) -> list[LoadPlan]:
    """One for each worker rank, every time a new object."""
    sources = tuple(ParamMeta(meta.name, meta.dtype, meta.shape) for meta in scene.metadata)
    plans = []
    for demands in scene.demands:
        some = [demand for demand in demands if demand.source.numel]
        ends: dict[int, int] = defaultdict(int)
        for demand in some:
            ends[demand.target] = max(ends[demand.target], last_element(demand.region) + 1)
        targets = tuple(
            Target(f"t{target}", BYTES[target // 10], size, (View(f"t{target}", 0, (size,), (1,)),))
            for target, size in ends.items()
        )
        copies = tuple(
            Copy(scene.metadata[demand.parameter].name, demand.source, f"t{demand.target}", demand.region)
            for demand in some
        )
        plans.append(LoadPlan(sources, targets, copies))
    return plans


def write(folder: Path, scene: Scene) -> None:
    write_source_layout(folder / SOURCE_FILE, scene.metadata, scene.trainers)
    write_worker_layouts(folder / WORKERS_FILE, load_plans(scene))


def split(cells: int, rows: int, columns: int, ranks: int) -> Scene:
    """A matrix cut by rows over `cells` trainer ranks and by columns over `ranks` worker ranks."""
    meta = ParamMeta("layer.weight", torch.float32, (rows, columns), owners=tuple(range(cells)), placements=(Shard(0),))
    width = columns // ranks
    parts = [Region(rank * width, (rows, width), (columns, 1)) for rank in range(ranks)]
    demands = [[Demand(0, part, 40, Region(0, (rows, width), (width, 1)))] for part in parts]
    return Scene([meta], cells, demands)


def run(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(each) for each in arguments])
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    return status, out.getvalue(), err.getvalue()
