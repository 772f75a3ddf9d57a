"""Workers that are late, slow or stopped, over each way for the bytes; producers that die while a link is opened."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from core.tests.sharded_fleet import Pairs, boxes, details_of, serve
from plugins.rdt.tests.fleet import Trainers
from plugins.rdt.tests.test_topology import METADATA, NAMES, NBYTES, OF_ONE, SMALL, Model, check, kill_producer, model
from weightwire.clients.fanout import FanoutClient
from weightwire.errors import PeerLost, PeerStalled
from weightwire.testing.fixtures import BorrowRanks
from weightwire_rdt.trainer import ShardedRDTTrainerWeightTransferEngine

State = dict[str, Any]
PAUSE = 1.5
WAYS = ["nixl", *(pytest.param(way, marks=pytest.mark.thorough) for way in ("ray_nixl", "gloo", "object_store"))]


class Slow(Model):
    """Takes its time for each tensor, and needs every one whole."""

    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            time.sleep(0.0 if tensor.is_meta else PAUSE / 10)
            super().load_weights([(name, torch.stack([tensor])[0])])


def slow_model(state: State, index: int, count: int, names: Sequence[str]) -> nn.Module:
    return Slow(names)


@pytest.mark.parametrize("way", WAYS)
def test_a_late_worker_and_a_slow_one(ranks: BorrowRanks, way: str) -> None:
    """They cost time and nothing else: no buffer is used again before it is read."""
    late, slow = ranks(2)
    clients = [serve([late], model, NAMES), serve([slow], slow_model, NAMES)]
    options = {"tensor_transport": way, "num_rdt_buffers": 1, **SMALL}
    fleet = Trainers(ranks(2), FanoutClient(clients), boxes, METADATA, **options).opened()
    for seed in (1, 2):
        late.at("worker.begin", "stop")
        calls = fleet.start(seed)
        late.reached("worker.begin")
        time.sleep(PAUSE)
        assert not any(call.done() for call in calls)
        late.resume()
        for call in calls:
            call.result()
        check([late, slow], seed)
    assert details_of(calls[0].result(), 1)["opaque_bytes"] == NBYTES
    fleet.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_worker_is_named_by_whoever_waits_for_it(ranks: BorrowRanks, way: str) -> None:
    going, stopped = ranks(2)
    client = serve([going, stopped], model, NAMES)
    options = {"tensor_transport": way, "num_rdt_buffers": 1, "stall_timeout_s": 1.5, "timeout": 40.0, **SMALL}
    fleet = Trainers(ranks(1), client, boxes, OF_ONE, **options).opened()
    fleet.send(1)
    stopped.at("worker.begin", "stop")
    (error,) = fleet.send_in_vain(2)
    assert isinstance(error, PeerStalled), error
    assert "worker rank 1" in str(error)
    check([going], 1)
    stopped.resume()
    fleet.send(3)
    check([going, stopped], 3)
    fleet.close()


def lose_producer(state: State) -> None:
    """Have this rank's producer end when the next link has been opened at it, before it was asked for requests."""
    collect = ShardedRDTTrainerWeightTransferEngine._collect

    def lose(engine: Any, *arguments: Any) -> Any:
        ShardedRDTTrainerWeightTransferEngine._collect = collect  # type: ignore[method-assign]
        kill_producer({"trainer": engine})
        return collect(engine, *arguments)

    ShardedRDTTrainerWeightTransferEngine._collect = lose  # type: ignore[method-assign, assignment]


def test_a_producer_that_dies_while_a_link_is_opened(ranks: BorrowRanks) -> None:
    workers, trainers = ranks(1), ranks(2)
    client = serve(workers, model, NAMES)
    trainers[1].call(lose_producer)
    errors = Trainers(trainers, client, boxes, METADATA, **SMALL).errors()
    assert all(isinstance(error, PeerLost) for error in errors), errors
    assert all("the producer of trainer rank 1 is gone" in str(error) for error in errors)
    fleet = Trainers(trainers, client, boxes, METADATA, **SMALL).opened()
    fleet.send(1)
    check(workers, 1)
    fleet.close()
