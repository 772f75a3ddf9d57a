"""Servers that are lost in the middle of a round, between rounds, or left out of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from core.tests.sharded_fleet import boxes, info, sent_by, serve
from plugins.rdt.tests.fleet import Trainers
from plugins.rdt.tests.test_topology import METADATA, NAMES, NBYTES, OF_ONE, SMALL, check, model
from weightwire.clients.fanout import FanoutClient
from weightwire.errors import MessageError
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank

State = dict[str, Any]


def persist(state: State, seed: int, **options: Any) -> Any:
    """Send to the servers that are there."""
    trainer, state["source"].seed = state["trainer"], seed
    return trainer.client.persist(lambda: trainer.send_weights(**options)).to_json()


def replace(state: State, place: int, client: Any) -> None:
    """Another process serves in the place of one that is gone."""
    state["trainer"].client.clients[place] = client


def committed(report: dict[str, Any]) -> list[bool]:
    return [server["error"] is None for server in report["servers"]]


def start_persisting(trainers: Sequence[Rank], seed: int, **options: Any) -> dict[str, Any]:
    """Rank 0's report of one round."""
    reports = [call.result() for call in [rank.start(persist, seed, **options) for rank in trainers]]
    first: dict[str, Any] = reports[0]
    return first


def two_servers(ranks: BorrowRanks, trainers: int, **options: Any) -> tuple[list[Rank], list[Rank], Trainers]:
    """Two servers of one worker each, sharded trainer ranks, and their link."""
    workers, senders = ranks(2), ranks(trainers)
    client = FanoutClient([serve([rank], model, NAMES) for rank in workers], "best_effort")
    return workers, senders, Trainers(senders, client, boxes, OF_ONE if trainers == 1 else METADATA, **options).opened()


WAYS = ["nixl", *(pytest.param(way, marks=pytest.mark.thorough) for way in ("ray_nixl", "object_store"))]


@pytest.mark.parametrize("way", WAYS)
def test_workers_that_drop_out_in_the_middle_and_one_that_comes_late(ranks: BorrowRanks, way: str) -> None:
    """A server of two of which one dies and one whose only process stops: the others finish the round."""
    lost, dies, stays, stops = ranks(4)
    clients = [serve([lost, dies], model, NAMES), *(serve([rank], model, NAMES) for rank in (stays, stops))]
    trainers = ranks(2)
    options = {"tensor_transport": way, "peer_timeout": 2.0, **SMALL}
    fleet = Trainers(trainers, FanoutClient(clients, "best_effort"), boxes, METADATA, **options).opened()
    assert committed(start_persisting(trainers, 1)) == [True, True, True]
    check([lost, dies, stays, stops], 1)
    dies.at("communicator.first_piece", "kill")
    dies.at("worker.received", "kill")
    stops.at("worker.vote", "stop")
    report = start_persisting(trainers, 2)
    assert (report["round"], report["reinitialised"]) == (1, False)
    assert committed(report) == [False, True, False]
    assert "worker rank 1 (pid " in report["servers"][0]["error"]
    assert "worker rank 3 (pid " in report["servers"][2]["error"]
    assert [rank["rank"] for rank in report["ranks"]] == ["trainer rank 0", "trainer rank 1", "worker rank 2"]
    check([stays], 2)
    check([lost], 1)
    assert lost.call(info)["weights"] == "whole"
    (comes,) = ranks(1)
    fleet.each(replace, 0, serve([comes], model, NAMES))
    report = start_persisting(trainers, 3)
    assert committed(report) == [True, True, False]
    assert report["reinitialised"]
    check([comes, stays], 3)
    assert sum(sent_by(report, "trainer rank")) == 2 * NBYTES
    fleet.close()


def test_a_server_that_is_lost_between_rounds(ranks: BorrowRanks) -> None:
    """The next round does without it, over the same link."""
    (stays, dies), trainers, fleet = two_servers(ranks, 2, **SMALL)
    start_persisting(trainers, 1)
    dies.kill()
    report = start_persisting(trainers, 2)
    assert (report["round"], report["reinitialised"], committed(report)) == (1, False, [True, False])
    check([stays], 2)
    fleet.close()


def test_rounds_for_some_of_the_servers(ranks: BorrowRanks) -> None:
    (first, second), trainers, fleet = two_servers(ranks, 2, **SMALL)
    report = start_persisting(trainers, 1, live_consumer_ids=[1])
    assert committed(report) == [False, True]
    assert "left out of the round" in report["servers"][0]["error"]
    check([second], 1)
    assert committed(start_persisting(trainers, 2)) == [True, True]
    check([first, second], 2)
    for wrong in ([], [2], ["0"], [0, "1"]):
        for call in [rank.start(persist, 3, live_consumer_ids=wrong) for rank in trainers]:
            error = call.exception()
            assert isinstance(error, MessageError)
            assert "not worker ranks of 0 to 1" in str(error)
    assert not start_persisting(trainers, 3, live_consumer_ids=[0, 1])["reinitialised"]
    fleet.close()


@pytest.mark.thorough
def test_over_gloo_the_round_is_repeated_without_a_worker_that_is_lost(ranks: BorrowRanks) -> None:
    (stays, dies), trainers, fleet = two_servers(ranks, 1, tensor_transport="gloo", **SMALL)
    start_persisting(trainers, 1)
    dies.at("worker.received", "kill")
    report = start_persisting(trainers, 2)
    assert (report["reinitialised"], committed(report)) == (True, [True, False])
    check([stays], 2)
    fleet.close()
