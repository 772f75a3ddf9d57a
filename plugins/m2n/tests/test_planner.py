from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict, deque
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.m2n.tests.random_scenes import (
    Scene,
    Wire,
    loaded,
    random_meta,
    random_scene,
    receive,
    send,
    strided,
    tensors,
)
from weightwire.errors import MetadataError, UpdateRefused
from weightwire.region import Region
from weightwire.region_boxes import whole
from weightwire.resharding.demands import Demand, Workers
from weightwire.resharding.moves import Moves
from weightwire.resharding.planner import Plan
from weightwire.resharding.source_layout import SourceLayout, boxes, cells_of
from weightwire_m2n.bench_planning import Fleet, layouts, workers

randoms = st.randoms(use_true_random=False)


def lower_bound(scene: Scene) -> int:
    """Different elements that each worker reads, counted one by one."""
    found = 0
    for demands in scene.demands:
        read: dict[int, set[int]] = defaultdict(set)
        for demand in demands:
            if demand.source.numel:
                every = np.arange(scene.metadata[demand.parameter].numel)
                read[demand.parameter].update(strided(every, demand.source).reshape(-1).tolist())
        found += sum(len(each) * scene.metadata[index].dtype.itemsize for index, each in read.items())
    return found


def check_scene(scene: Scene) -> None:
    plan, full = scene.plan(), tensors(scene)
    wire: Wire = {}
    parts = [plan.for_trainer(rank) for rank in range(scene.trainers)]
    for rank, part in enumerate(parts):
        wire |= send(scene, rank, part, full)
    assert (
        sum(len(part) for message in wire.values() for part in message)
        == plan.coverage.wire
        == plan.coverage.lower_bound
        == lower_bound(scene)
    )
    assert plan.sent == [int(part.nbytes.sum()) for part in parts]
    digests = {pair: digest for part in parts for pair, digest in part.pair_digests().items()}
    for worker in range(len(scene.demands)):
        part = scene.plan().for_worker(worker)
        received = receive(scene, worker, part, wire)
        expected = loaded(scene, worker, full)
        assert all((received[target] == expected[target]).all() for target in expected)
        for pair, digest in part.pair_digests().items():
            assert digests.pop(pair) == digest
    assert not wire
    assert not digests


@given(randoms)
def test_a_plan_loads_what_plain_loading_does(random: Random) -> None:
    check_scene(random_scene(random))


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_plan_loads_what_plain_loading_does_often() -> None:
    random = Random(11)
    for _ in range(300):
        check_scene(random_scene(random))


# Source layouts


@given(randoms)
def test_cells_are_the_boxes_of_the_metadata(random: Random) -> None:
    meta = random_meta(random, "w", random.randint(1, 12))
    if meta.owners is None or meta.mesh_shape is None:
        return
    layout = SourceLayout.of(meta)
    start, stop = boxes(layout.shape, meta.mesh_shape, layout.placements)
    cells = cells_of(layout.shape, meta.mesh_shape, layout.placements)
    counts = np.zeros(meta.shape, np.int64)
    for cell in range(len(cells)):
        counts[tuple(map(slice, cells.start[cell], cells.stop[cell]))] += 1
    assert (counts == 1).all()
    for position, rank in enumerate(meta.owners):
        box, cell = meta.box(rank), cells.of_position[position]
        assert (cell == -1) == box.empty
        if not box.empty:
            assert (tuple(start[position]), tuple(stop[position])) == (box.start, box.stop)
            assert (tuple(cells.start[cell]), tuple(cells.stop[cell])) == (box.start, box.stop)
            assert position in cells.holders[cell]


# The order, and what follows from it


@given(randoms)
def test_the_parts_are_the_whole(random: Random) -> None:
    scene = random_scene(random)
    plan = scene.plan()
    every = plan.everything()
    order = np.stack([every.parameter, every.cell, every.receiver, every.piece], axis=1).tolist()
    assert order == sorted(order)
    assert len(set(map(tuple, order))) == len(order)
    for role, parts in (
        ("sender", [plan.for_trainer(rank) for rank in range(scene.trainers)]),
        ("receiver", [plan.for_worker(rank) for rank in range(len(scene.demands))]),
    ):
        for rank, part in enumerate(parts):
            rows = np.flatnonzero(getattr(every, role) == rank)
            assert all((column == every.columns[name][rows]).all() for name, column in part.columns.items())
    traffic = plan.traffic()
    assert traffic.sum(axis=1).tolist() == plan.sent
    np.subtract.at(traffic, (every.sender, every.receiver), every.nbytes)
    assert not traffic.any()


@given(randoms)
def test_no_rank_waits_for_ever_with_one_message_at_a_time(random: Random) -> None:
    scene = random_scene(random)
    plan = scene.plan()

    def queue(part: Moves) -> deque[tuple[int, int, int]]:
        firsts = (int(rows[0]) for rows in part.messages())
        return deque((int(part.sender[k]), int(part.receiver[k]), int(part.message[k])) for k in firsts)

    senders = [queue(plan.for_trainer(rank)) for rank in range(scene.trainers)]
    receivers = [queue(plan.for_worker(rank)) for rank in range(len(scene.demands))]
    while any(senders):
        ready = [queued for queued in senders if queued and receivers[queued[0][1]][0] == queued[0]]
        assert ready
        for queued in ready:
            receivers[queued[0][1]].popleft()
            queued.popleft()
    assert not any(receivers)


@given(randoms)
def test_permuting_workers_permutes_the_plan(random: Random) -> None:
    scene = random_scene(random)
    order = random.sample(range(len(scene.demands)), len(scene.demands))
    moved = Scene(scene.metadata, scene.trainers, [scene.demands[rank] for rank in order])
    scene = Scene(scene.metadata, scene.trainers, scene.demands)

    def rows(plan: Plan, names: list[int]) -> list[list[int]]:
        every = plan.everything()
        receiver = np.array(names)[every.receiver]
        held = [every.parameter, every.cell, receiver, every.piece, every.nbytes]
        cells = zip(every.sender.tolist(), every.parameter.tolist(), every.cell.tolist(), strict=True)
        alone = [rank if len(plan.instances[index].groups[cell]) == 1 else -1 for rank, index, cell in cells]
        return sorted(np.column_stack([*held, alone, every.offset, every.sizes, every.strides]).tolist())

    assert rows(scene.plan(), list(range(len(order)))) == rows(moved.plan(), order)
    assert scene.plan().coverage == moved.plan().coverage


def test_the_same_for_every_hash_seed() -> None:
    """Planned in processes with hash seeds of their own, and without torch."""
    script = """
import json, sys
from weightwire_m2n.bench_planning import Fleet, layouts, workers
from weightwire.resharding.planner import Plan
fleet = Fleet(trainers=16, expert_ranks=4, replicas=2, layers=9, experts=8, sharded=True)
parameters = list(layouts(fleet))
plan = Plan(parameters, fleet.trainers, workers(fleet, parameters))
assert "torch" not in sys.modules
pairs = sorted(plan.for_trainer(3).pair_digests().items()) + sorted(plan.for_worker(5).pair_digests().items())
print(json.dumps([plan.digest, pairs]))
"""
    found = []
    for seed in ("0", "1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 0, ran.stderr
        found.append(json.loads(ran.stdout))
    assert found[0] == found[1] == found[2]
    assert len(found[0][1]) > 4


# Who sends, and how


def of_ranks(demands: list[list[Demand]]) -> Workers:
    return Workers.of(demands)


def test_fsdp_to_tensor_parallel() -> None:
    """Rows over 4 ranks to columns over 2: every trainer rank sends half of its rows to each worker."""
    layout = SourceLayout("w", (10, 8), 2, (0, 1, 2, 3), (4,), (0,))
    halves = [Region(4 * rank, (10, 4), (8, 1)) for rank in range(2)]
    plan = Plan([layout], 4, of_ranks([[Demand(0, half, 0, whole((10, 4)))] for half in halves]))
    assert plan.traffic().tolist() == [[24, 24], [24, 24], [24, 24], [8, 8]]
    part = plan.for_trainer(3)
    assert part.offset.tolist() == [0, 4]
    assert part.sizes.tolist() == [[1, 4], [1, 4]]
    assert plan.coverage.wire == plan.coverage.lower_bound == 160


def test_replicas_share_the_sending() -> None:
    layouts = [SourceLayout(f"w{k}", (16,), 2) for k in range(10)]
    everything = [Demand(k, whole((16,)), k, whole((16,))) for k in range(10)]
    plan = Plan(layouts, 3, of_ranks([everything] * 4))
    assert max(plan.sent) - min(plan.sent) <= 32
    assert plan.everything().sender[:4].tolist() == [0, 1, 2, 0]


def test_a_tied_target_costs_no_second_crossing() -> None:
    tied = [Demand(0, whole((6, 4)), 0, whole((6, 4))), Demand(0, whole((6, 4)), 1, Region(0, (6, 4), (1, 6)))]
    rows = Demand(0, Region(8, (2, 4), (4, 1)), 2, whole((2, 4)))  # a part of it once more
    plan = Plan([SourceLayout("w", (6, 4), 4)], 1, of_ranks([[*tied, rows]]))
    assert plan.coverage.wire == plan.coverage.lower_bound == 96
    writes = plan.for_worker(0).writes
    assert writes is not None
    assert sorted(set(writes.target.tolist())) == [0, 1, 2]


def test_a_large_contiguous_move_is_a_message_of_its_own() -> None:
    layouts = [SourceLayout(name, (size,), 1) for name, size in (("a", 10), ("b", 500), ("c", 20), ("d", 90))]
    demands = [Demand(k, whole(of.shape), k, whole(of.shape)) for k, of in enumerate(layouts)]
    part = Plan(layouts, 1, of_ranks([demands]), buffer=100, large=100).for_trainer(0)
    assert part.message.tolist() == [0, 1, 2, 3]
    small = [Demand(0, whole((10,)), 0, whole((10,))), Demand(1, whole((20,)), 1, whole((20,)))]
    part = Plan(layouts[::2], 1, of_ranks([small]), buffer=100, large=100).for_trainer(0)
    assert (part.message.tolist(), part.place.tolist()) == ([0, 0], [0, 10])


def test_what_is_not_contiguous_is_cut_to_the_buffer() -> None:
    columns = Demand(0, Region(0, (100, 10), (20, 1)), 0, whole((100, 10)))
    part = Plan([SourceLayout("w", (100, 20), 4)], 1, of_ranks([[columns]]), buffer=130).for_trainer(0)
    assert set(part.nbytes.tolist()) == {120, 40}
    assert len(part) == 34


def test_equal_layouts_are_planned_once() -> None:
    def classes(layers: int) -> int:
        fleet = Fleet(trainers=16, expert_ranks=4, replicas=2, layers=layers, experts=8)
        parameters = list(layouts(fleet))
        return len(Plan(parameters, fleet.trainers, workers(fleet, parameters)).classes)

    assert classes(40) == classes(8) < 40


# What is refused


def test_a_name_that_nobody_takes() -> None:
    layouts = [SourceLayout("a", (2,), 2), SourceLayout("b", (2,), 2), SourceLayout("empty", (0,), 2)]
    coverage = Plan(layouts, 1, of_ranks([[Demand(0, whole((2,)), 0, whole((2,)))]])).coverage
    assert coverage.unclaimed == ("b",)
    coverage.check(strict=False)
    coverage.check(foreign=("b",))
    with pytest.raises(UpdateRefused, match="no worker takes parameter 'b': declare it foreign") as caught:
        coverage.check()
    assert caught.value.parameter == "b"


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        (Demand(0, whole((3, 3)), 0, whole((3, 3))), "parameter 'w'.* leaves its shape"),
        (Demand(0, whole((2, 2)), 0, whole((4,))), "parameter 'w'.* of other extents"),
        (Demand(1, whole((2, 2)), 0, whole((2, 2))), "asks for parameter 1 of 1"),
    ],
)
def test_demands_that_do_not_fit(demand: Demand, words: str) -> None:
    with pytest.raises(MetadataError, match=words):
        Plan([SourceLayout("w", (2, 4), 2)], 1, of_ranks([[demand]]))


def test_an_owner_that_is_no_trainer_rank() -> None:
    with pytest.raises(MetadataError, match="parameter 'w' is owned by trainer rank 5, and there are 4"):
        Plan([SourceLayout("w", (2,), 2, (5,), (1,))], 4, of_ranks([[]]))


def test_a_buffer_that_holds_no_element() -> None:
    with pytest.raises(MetadataError, match="a buffer of 7 bytes does not hold an element of 8"):
        Plan([SourceLayout("w", (2,), 8)], 1, of_ranks([[]]), buffer=7)
