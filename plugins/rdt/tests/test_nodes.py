"""Ray nodes that are killed: with a worker's actor, and with a trainer rank's producer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from core.tests.sharded_fleet import Named, drive, held, info, loaded, named, send, serve
from plugins.rdt.tests.cluster import Cluster
from plugins.rdt.tests.fleet import Trainers
from plugins.rdt.tests.held_sources import held_boxes, hold, let_go, reached
from plugins.rdt.tests.second_node import SecondNode, join_at
from weightwire.clients.fanout import FanoutClient, Policy
from weightwire.errors import DeadlineExceeded, PeerLost
from weightwire.layout import ParamMeta, Shard
from weightwire.messages import ParallelConfig
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool import RankPool
from weightwire.testing.pool_process import Rank
from weightwire_rdt import RayWorkerGroup

pytestmark = pytest.mark.timeout(300)
STARTING = 110
IN_TIME = 15.0
"""Seconds in which everybody has to hear that a node is lost."""
RAY_NOTICES = 15.0
"""How long Ray takes to say that nothing will start on a node that is lost."""
SMALL = {"buffer_bytes": 256, "direct_bytes": 64}
METADATA = [
    ParamMeta("whole", torch.float32, (9, 5), owners=(0,)),
    ParamMeta("rows", torch.float32, (7, 6), owners=(0, 1), placements=(Shard(0),)),
    ParamMeta("columns", torch.bfloat16, (4, 10), owners=(1, 0), placements=(Shard(1),)),
    ParamMeta("other", torch.float64, (6, 3), owners=(1,)),
]
NAMES = [meta.name for meta in METADATA]
State = dict[str, Any]


# A worker in an actor


def build(parallel: ParallelConfig, device: torch.device) -> nn.Module:
    return Named(METADATA, NAMES)


def start_worker(state: State, resource: str) -> None:
    """Start a server of one worker actor on the node that has the resource."""
    options = {"num_cpus": 0, "resources": {resource: 1}}
    state["far"] = RayWorkerGroup.start(f"{__name__}:build", 1, place=lambda rank: options, timeout=100)


def send_to_both(state: State, policy: Policy) -> None:
    """Have the trainer drive the worker actor, too, from the next link on."""
    drive(state, FanoutClient([state["trainer"].client, state["far"]], policy))


def checksums(state: State) -> Any:
    return state["far"].checksums()


@contextmanager
def in_time(seconds: float = IN_TIME) -> Iterator[None]:
    begun = time.monotonic()
    yield
    took = time.monotonic() - begun
    assert took < seconds


def check(workers: Sequence[Rank], seed: int) -> None:
    for rank in workers:
        assert rank.call(held) == loaded(METADATA, NAMES, seed)
        assert rank.call(info)["weights"] == "whole"


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["in a round", "between rounds"])
@pytest.mark.parametrize("policy", ["all", "best_effort"])
def test_a_node_with_a_worker_is_killed(ranks: BorrowRanks, cluster: Cluster, when: str, policy: Policy) -> None:
    near, trainers = ranks(1), ranks(2)
    client = serve(near, named, METADATA, [NAMES])
    with SecondNode(cluster) as node:
        trainers[0].call(start_worker, node.resource, timeout=STARTING)
        fleet = Trainers(trainers, client, held_boxes, METADATA, **SMALL).opened()
        trainers[0].call(send_to_both, policy)
        fleet.send(1)
        assert trainers[0].call(checksums) == [loaded(METADATA, NAMES, 1)]
        if when == "in a round":
            trainers[1].call(hold)
            calls = fleet.start(2)
            trainers[1].call(reached)
            node.kill()
            trainers[1].call(let_go)
        else:
            node.kill()
            calls = fleet.start(2)
        with in_time():
            outcomes = [call.exception(IN_TIME) or call.result() for call in calls]
    report = outcomes[0]
    if policy == "all":
        assert all(isinstance(error, PeerLost) for error in outcomes), outcomes
        assert all("worker rank 1" in str(error) for error in outcomes), outcomes
        check(near, 1)
    else:
        assert isinstance(report, dict), report
        assert [server["error"] is None for server in report["servers"]] == [True, False]
        check(near, 2)
    fleet.each(drive, client)
    with in_time():
        fleet.send(3)
    check(near, 3)
    fleet.close()


# A trainer rank on the second node


@pytest.fixture
def guest(pool: RankPool) -> Iterator[Rank]:
    """A process that has joined no cluster yet, and is of no use afterwards."""
    (rank,) = pool.borrow(1, fresh=True)
    yield rank
    rank.kill()
    pool.give_back([rank])


def open_across(near: Rank, guest: Rank, node: SecondNode, cluster: Cluster, client: Any, way: str) -> Trainers:
    """Trainer ranks on both nodes, the second on the second."""
    guest.call(join_at, cluster.variables, node.address)
    return Trainers([near, guest], client, held_boxes, METADATA, tensor_transport=way, **SMALL).opened()


def killed_in_a_round(node: SecondNode, fleet: Trainers) -> BaseException | None:
    guest = fleet.ranks[1]
    guest.call(hold)
    sending = fleet.start(2)[0]
    guest.call(reached)
    node.kill()
    guest.kill()
    return sending.exception()


def killed_between_rounds(node: SecondNode, fleet: Trainers) -> BaseException | None:
    """Rank 0 opens the link again, and waits for the other one to come for as long as it is told to."""
    near, guest = fleet.ranks
    node.kill()
    guest.kill()
    return near.start(send, 2, timeout=5.0).exception()


@pytest.mark.thorough
@pytest.mark.parametrize(("way", "in_a_round"), [("nixl", True), ("object_store", True), ("nixl", False)])
def test_a_node_with_a_trainer_rank_is_killed(
    ranks: BorrowRanks, guest: Rank, cluster: Cluster, way: str, in_a_round: bool
) -> None:
    workers, (near, other) = ranks(2), ranks(2)
    client = serve(workers, named, METADATA, [NAMES, NAMES])
    with SecondNode(cluster) as node:
        fleet = open_across(near, guest, node, cluster, client, way)
        fleet.send(1)
        with in_time():
            error = (killed_in_a_round if in_a_round else killed_between_rounds)(node, fleet)
        assert isinstance(error, PeerLost | DeadlineExceeded), error
        assert "trainer rank 1" in str(error)
        check(workers, 1)
    fleet = Trainers([near, other], client, held_boxes, METADATA, tensor_transport=way, **SMALL).opened()
    fleet.send(3)
    check(workers, 3)
    fleet.close()


@pytest.mark.thorough
def test_a_trainer_rank_that_outlives_its_node(ranks: BorrowRanks, guest: Rank, cluster: Cluster) -> None:
    """Over NIXL a round needs neither the producer nor Ray; a link does."""
    workers, (near,) = ranks(2), ranks(1)
    client = serve(workers[:1], named, METADATA, [NAMES])
    with SecondNode(cluster) as node:
        fleet = open_across(near, guest, node, cluster, client, "nixl")
        fleet.send(1)
        node.kill()
        assert not fleet.send(2)["reinitialised"]
        check(workers[:1], 2)
        near.call(drive, FanoutClient([client, serve(workers[1:], named, METADATA, [NAMES])]))
        with in_time(RAY_NOTICES + IN_TIME):
            errors = fleet.send_in_vain(3)
        for error in errors:
            assert isinstance(error, PeerLost)
            assert "the producer of trainer rank 1 is gone" in str(error)
        check(workers[:1], 2)
