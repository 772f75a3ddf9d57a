"""Plans that each worker makes by itself: they need nothing of the others, and still share the work out."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.m2n.tests.random_scenes import Scene, Wire, loaded, memories, random_scene, receive, send, tensors
from weightwire.region import Region
from weightwire.region_boxes import whole
from weightwire.resharding.demands import Demand, Workers
from weightwire.resharding.moves import Beside, Moves, cut_messages
from weightwire.resharding.planner import Plan
from weightwire.resharding.source_layout import SourceLayout

randoms = st.randoms(use_true_random=False)


def alone(scene: Scene, worker: int, ordinal: int, groups: Sequence[int] | None = None) -> Plan:
    layouts = [SourceLayout.of(meta) for meta in scene.metadata]
    wanted = Workers.of([scene.demands[worker]])
    return Plan(layouts, scene.trainers, wanted, buffer=scene.buffer, large=scene.large, groups=groups, ordinal=ordinal)


def random_groups(random: Random, scene: Scene) -> list[int]:
    return sorted(random.randrange(3) for _ in scene.metadata)


# What it brings


@settings(max_examples=20)
@given(randoms)
def test_a_worker_that_plans_alone_loads_what_plain_loading_does(random: Random) -> None:
    scene, ordinal = random_scene(random), random.randrange(20)
    full, groups = tensors(scene), random_groups(random, scene)
    for worker in range(len(scene.demands)):
        plan = alone(scene, worker, ordinal + worker, groups)
        mine = Scene(scene.metadata, scene.trainers, [scene.demands[worker]], scene.buffer, scene.large)
        wire: Wire = {}
        for rank in range(scene.trainers):
            wire |= send(mine, rank, plan.for_trainer(rank), full)
        assert sum(len(part) for message in wire.values() for part in message) == plan.coverage.lower_bound
        assert plan.coverage.wire == plan.coverage.lower_bound == sum(plan.sent)
        found, expected = receive(mine, 0, plan.for_worker(0), wire), loaded(scene, worker, full)
        assert found.keys() == expected.keys() == memories(scene, worker).keys()
        assert all((found[target] == expected[target]).all() for target in expected)
        assert not wire


@settings(max_examples=20)
@given(randoms)
def test_only_those_that_have_it_are_asked(random: Random) -> None:
    scene = random_scene(random)
    for worker, ordinal in enumerate(random.sample(range(100), len(scene.demands))):
        plan = alone(scene, worker, ordinal)
        part = plan.for_worker(0)
        for parameter, cell, sender in zip(part.parameter, part.cell, part.sender, strict=True):
            meta = scene.metadata[parameter]
            box = meta.box(int(sender))
            assert meta.owned_by(int(sender))
            assert not box.empty
            assert int(sender) in plan.instances[parameter].groups[cell]
            held = plan.instances[parameter].of.cells
            assert (tuple(held.start[cell]), tuple(held.stop[cell])) == (box.start, box.stop)


# Who sends


def traffic(layouts: Sequence[SourceLayout], trainers: int, workers: int) -> list[Moves]:
    """What each of some workers that take everything asks for."""
    everything = [Demand(place, whole(of.shape), place, whole(of.shape)) for place, of in enumerate(layouts)]
    return [
        Plan(layouts, trainers, Workers.of([everything]), ordinal=worker).for_worker(0) for worker in range(workers)
    ]


def busy(parts: Sequence[Moves], trainers: int) -> list[int]:
    return [int(sum(part.nbytes[part.sender == rank].sum() for part in parts)) for rank in range(trainers)]


@given(st.integers(2, 7), st.integers(1, 5), st.integers(1, 40))
def test_replicas_share_the_sending_of_equal_parameters(replicas: int, workers: int, parameters: int) -> None:
    nbytes = 24
    parts = traffic([SourceLayout(f"w{at}", (12,), 2) for at in range(parameters)], replicas, workers)
    for part in parts:
        of_one = busy([part], replicas)
        assert max(of_one) - min(of_one) <= nbytes
    total = busy(parts, replicas)
    assert sum(total) == workers * parameters * nbytes
    # Whoever begins one further than the last worker evens out what that one left over.
    assert max(total) <= sum(total) / replicas + nbytes * min(workers, replicas)
    assert not parameters >= replicas or min(total) > 0


def test_replicas_of_a_mesh_share_the_sending_and_others_are_left_alone() -> None:
    """Experts on four of eight ranks, two halves of two replicas each."""
    layouts = [SourceLayout(f"e{at}", (8, 3), 4, (2, 5, 7, 4), (2, 2), (0, None)) for at in range(100)]
    parts = traffic(layouts, 8, 3)
    total = busy(parts, 8)
    assert [rank for rank, sent in enumerate(total) if sent] == [2, 4, 5, 7]
    assert max(total) <= 1.02 * sum(total) / 4
    assert all(set(part.sender[part.cell == 0].tolist()) == {2, 5} for part in parts)
    assert all(set(part.sender[part.cell == 1].tolist()) == {4, 7} for part in parts)


def test_workers_begin_at_different_replicas() -> None:
    layouts = [SourceLayout("w", (4,), 4, (3, 1, 6), (3,), (None,)), SourceLayout("v", (5,), 4)]
    parts = traffic(layouts, 7, 14)
    assert [int(part.sender[0]) for part in parts] == [1, 3, 6] * 4 + [1, 3]
    assert sorted(int(part.sender[1]) for part in parts) == sorted([*range(7)] * 2)


def test_the_turn_is_of_each_kind_of_parameter() -> None:
    """Weights and biases take turns: in pairs, all weights would come from one rank and all biases from the other."""
    layouts = [SourceLayout(f"{kind}{at}", (size,), 4) for at in range(6) for kind, size in (("w", 64), ("b", 1))]
    (part,) = traffic(layouts, 2, 1)
    assert part.sender.tolist() == [0, 0, 1, 1] * 3


def test_the_same_for_every_hash_seed() -> None:
    """Planned in processes with hash seeds of their own, and without torch."""
    script = """
import json, sys
from weightwire.region import Region
from weightwire.region_boxes import whole
from weightwire.resharding.demands import Demand, Workers
from weightwire.resharding.planner import Plan
from weightwire.resharding.source_layout import SourceLayout
layouts = [SourceLayout(f"w{at}", (8 + at % 3, 6), 2, (3, 0, 5, 1), (2, 2), (at % 2, None)) for at in range(12)]
halves = [Demand(at, Region(3, (of.shape[0], 3), (6, 1)), at, whole((of.shape[0], 3))) for at, of in enumerate(layouts)]
plan = Plan(layouts, 6, Workers.of([halves]), buffer=64, groups=[at // 4 for at in range(12)], ordinal=5)
part = plan.for_worker(0)
assert "torch" not in sys.modules
print(json.dumps([plan.digest, sorted(map(str, part.pair_digests().items())), part.sender.tolist()]))
"""
    found = []
    for seed in ("0", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 0, ran.stderr
        found.append(json.loads(ran.stdout))
    assert found[0] == found[1]
    assert len(set(found[0][2])) == 4


# Messages that end with a layer


def joined(part: Moves, scene: Scene, one: np.ndarray, other: np.ndarray) -> bool:
    """Whether the first move of a message had fitted the one before, by the rules of `cut_messages`."""
    rows = [*one.tolist(), int(other[0])]
    itemsize = np.array([scene.metadata[int(part.parameter[row])].dtype.itemsize for row in rows])
    message, _ = cut_messages(np.zeros(len(rows), np.int64), part.nbytes[rows], itemsize, scene.buffer, scene.large)
    return bool(message[-1] == message[0])


@settings(max_examples=20)
@given(randoms)
def test_no_message_is_of_two_groups_and_none_is_cut_needlessly(random: Random) -> None:
    scene = random_scene(random)
    groups = random_groups(random, scene)
    for worker in range(len(scene.demands)):
        part = alone(scene, worker, worker, groups).for_worker(0)
        by_pair: dict[int, list[np.ndarray]] = defaultdict(list)
        for rows in part.messages():
            assert len({groups[place] for place in part.parameter[rows].tolist()}) == 1
            by_pair[int(part.sender[rows[0]])].append(rows)
        for messages in by_pair.values():
            for one, other in itertools.pairwise(messages):
                if groups[int(part.parameter[one[0]])] == groups[int(part.parameter[other[0]])]:
                    assert not joined(part, scene, one, other)


@settings(max_examples=20)
@given(randoms)
def test_one_group_is_as_none(random: Random) -> None:
    scene = random_scene(random)
    for worker in range(len(scene.demands)):
        one, none = (alone(scene, worker, 3, groups).for_worker(0) for groups in ([7] * len(scene.metadata), None))
        assert all((one.columns[name] == column).all() for name, column in none.columns.items())


@pytest.mark.parametrize(
    ("groups", "messages"),
    [
        (None, [0, 0, 0, 1, 1, 1, 2, 2]),
        ([0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 2, 3, 3]),
        ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_messages_end_with_a_group(groups: list[int] | None, messages: list[int]) -> None:
    layouts = [SourceLayout(f"w{at}", (10,), 1) for at in range(8)]
    everything = [Demand(at, Region(0, (10,), (1,)), at, whole((10,))) for at in range(8)]
    plan = Plan(layouts, 1, Workers.of([everything]), buffer=32, large=32, groups=groups, ordinal=0)
    assert plan.for_worker(0).message.tolist() == messages
    assert plan.for_trainer(0).message.tolist() == messages


def test_the_digest_tells_groups_apart() -> None:
    layouts = [SourceLayout(f"w{at}", (10,), 1) for at in range(2)]
    wanted = Workers.of([[Demand(0, whole((10,)), 0, whole((10,)))]])
    digests = {Plan(layouts, 1, wanted, groups=groups, ordinal=0).digest for groups in (None, [0, 0], [0, 1])}
    assert len(digests) == 3


def test_moves_that_need_no_room_in_a_buffer() -> None:
    nbytes = np.array([8, 40, 40, 8, 100, 8, 16])
    beside = Beside(nbytes >= 32, 80)
    ones, zeros = np.ones(7, np.int64), np.zeros(7, np.int64)
    message, place = cut_messages(zeros, nbytes, ones, most=16, large=32, beside=beside)
    assert message.tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert [place[at] for at in (0, 3, 5, 6)] == [0, 8, 0, 0]
    assert cut_messages(zeros, nbytes, ones, most=16, large=32)[0].tolist() == [0, 1, 2, 3, 4, 5, 6]
