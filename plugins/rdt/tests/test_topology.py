"""Which ranks hold what, and what happens to links when some of them go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.tests.sharded_fleet import (
    Pairs,
    boxes,
    details_of,
    digests,
    drive,
    full,
    held,
    info,
    send,
    sent_by,
    serve,
    whole,
)
from plugins.rdt.tests.fleet import Trainers
from weightwire import LocalClient, ModuleSource, WeightTransferTrainerFactory, Worker
from weightwire.clients.fanout import FanoutClient
from weightwire.deadline import Deadline
from weightwire.errors import PeerLost, TransferError, UpdateRefused
from weightwire.layout import ParamMeta, Replicate, Shard
from weightwire.source import WeightSource
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank
from weightwire_rdt.messages import ShardedRDTTrainerInitInfo

State = dict[str, Any]
SMALL = {"buffer_bytes": 256, "direct_bytes": 64}
METADATA = [
    ParamMeta("layers.0.w", torch.float32, (5, 6), owners=(0,)),
    ParamMeta("layers.0.experts.0", torch.bfloat16, (40,), owners=(0, 1), placements=(Replicate(),)),
    ParamMeta("layers.0.experts.1", torch.bfloat16, (40,), owners=(0, 1), placements=(Replicate(),)),
    ParamMeta("layers.1.w", torch.float64, (4, 7), owners=(1,)),
    ParamMeta("layers.1.rows", torch.uint8, (5, 3), owners=(1, 0), placements=(Shard(0),)),
]
OF_ONE = [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in METADATA]
"""The same, all of it on one trainer rank."""
NAMES = [meta.name for meta in METADATA]
NBYTES = sum(meta.nbytes for meta in METADATA)


class Model(nn.Module):
    """Takes the tensors of some names, whole; names of layers have dots, which those of parameters have not."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        for meta in METADATA:
            if meta.name in names:
                zeros = torch.zeros(meta.shape, dtype=meta.dtype)
                self.register_parameter(meta.name.replace(".", "_"), nn.Parameter(zeros, False))

    def load_weights(self, pairs: Pairs) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in pairs:
            if (own := name.replace(".", "_")) in parameters:
                parameters[own].data.copy_(tensor)


def model(state: State, index: int, count: int, names: Sequence[str]) -> nn.Module:
    return Model(names)


def check(workers: Sequence[Rank], seed: int, names: Sequence[str] = NAMES) -> None:
    expected = Model(names)
    expected.load_weights(whole(METADATA, seed).items())
    for rank in workers:
        assert rank.call(held) == digests(expected)


def test_pipeline_stages_and_experts_on_several_ranks(ranks: BorrowRanks) -> None:
    workers = ranks(2)
    client = serve(workers, model, NAMES)
    fleet = Trainers(ranks(2), client, boxes, METADATA, **SMALL).opened()
    for seed in (1, 2):
        report = fleet.send(seed)
        check(workers, seed)
        assert sum(sent_by(report, "trainer rank")) == sum(sent_by(report, "worker rank")) == 2 * NBYTES
    # Of each expert one worker asks one of its holders, and the other worker the other one.
    pulled = [details_of(report, index)["pulled"] for index in range(2)]
    own = {0: 5 * 6 * 4 + 2 * 3, 1: 4 * 7 * 8 + 3 * 3}
    for rank, nbytes in own.items():
        assert [of[f"trainer rank {rank}"] for of in pulled] == [nbytes + 80] * 2
    fleet.close()


def gathers(state: State, names: Sequence[str]) -> None:
    state["source"].gathered = {meta.name: meta.nbytes for meta in METADATA if meta.name in names}


def test_what_a_source_gathers_is_reported(ranks: BorrowRanks) -> None:
    client = serve(ranks(1), model, NAMES)
    trainers = ranks(2)
    fleet = Trainers(trainers, client, boxes, METADATA, **SMALL).opened()
    trainers[1].call(gathers, NAMES[3:])
    report = fleet.send(1)
    assert [rank["details"]["gathered_bytes"] for rank in report["ranks"][:2]] == [0, 4 * 7 * 8 + 5 * 3]
    fleet.close()


def test_checksums_of_chunks_between_several_ranks(ranks: BorrowRanks) -> None:
    workers = ranks(2)
    client = serve(workers, model, NAMES)
    fleet = Trainers(ranks(2), client, boxes, METADATA, checksum=True, timeout=10.0, **SMALL).opened()
    for seed in (1, 2):
        fleet.send(seed)
        check(workers, seed)
    fleet.close()


class FullSource(WeightSource):
    """Whole tensors, which each owner can make and none has."""

    def __init__(self, metadata: Sequence[ParamMeta], rank: int) -> None:
        self._metadata, self._rank = list(metadata), rank
        self.seed = 1

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return self._metadata

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        for meta in self._metadata:
            if meta.owned_by(self._rank):
                yield meta.name, full(meta, self.seed)


def whole_source(state: State, rank: int, count: int, metadata: Sequence[ParamMeta]) -> WeightSource:
    return FullSource(metadata, rank)


def test_a_source_that_has_only_whole_tensors(ranks: BorrowRanks) -> None:
    workers = ranks(1)
    fleet = Trainers(
        ranks(2), serve(workers, model, NAMES), whole_source, METADATA, gather_lookahead=0, **SMALL
    ).opened()
    for seed in (1, 2):
        report = fleet.send(seed)
        check(workers, seed)
        assert sum(sent_by(report, "worker rank")) == NBYTES
    fleet.close()


def test_a_name_that_no_worker_takes(ranks: BorrowRanks) -> None:
    workers, trainers = ranks(1), ranks(2)
    taken = [name for name in NAMES if name != "layers.1.w"]
    client = serve(workers, model, taken)
    for error in Trainers(trainers, client, boxes, METADATA, **SMALL).errors():
        assert isinstance(error, UpdateRefused), error
        assert "no worker takes parameter 'layers.1.w': declare it foreign" in str(error)
    fleet = Trainers(trainers, client, boxes, METADATA, foreign=["layers.1.w"], **SMALL).opened()
    report = fleet.send(3)
    check(workers, 3, taken)
    assert sum(sent_by(report, "trainer rank")) == NBYTES - 4 * 7 * 8
    fleet.close()


class Spoiled(FullSource):
    """Tensors that stay, the first of which is written while the others are asked for."""

    def __init__(self, metadata: Sequence[ParamMeta], rank: int) -> None:
        super().__init__(metadata, rank)
        self.spoil = False
        self._tensors = [torch.zeros(meta.shape, dtype=meta.dtype) for meta in metadata]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        for meta, tensor in zip(self._metadata, self._tensors, strict=True):
            tensor.copy_(full(meta, self.seed))
        for place, meta in enumerate(self._metadata):
            if place and self.spoil:
                self._tensors[0].add_(1)
            yield meta.name, self._tensors[place]


def spoiled_source(state: State, rank: int, count: int, metadata: Sequence[ParamMeta]) -> WeightSource:
    return Spoiled(metadata, rank)


def spoil(state: State, value: bool) -> None:
    state["source"].spoil = value


def test_a_parameter_that_is_written_during_the_round(ranks: BorrowRanks) -> None:
    (worker,) = ranks(1)
    fleet = Trainers(ranks(1), serve([worker], model, NAMES), spoiled_source, OF_ONE, **SMALL).opened()
    fleet.send(1)
    check([worker], 1)
    fleet.each(spoil, True)
    (error,) = fleet.send_in_vain(2)
    assert isinstance(error, TransferError)
    assert "parameter 'layers.0.w' was written while workers were reading it" in str(error)
    check([worker], 1)
    assert worker.call(info)["weights"] == "whole"
    fleet.each(spoil, False)
    fleet.send(3)
    check([worker], 3)
    fleet.close()


def kill_producer(state: State) -> None:
    """End this rank's producer, and wait until it is gone."""
    import ray

    actor = state["trainer"]._producer
    ray.kill(actor)
    deadline = Deadline(20, what="the producer to be gone")
    while True:  # it may still answer what it was asked before it hears that it is to end
        try:
            ray.get(actor.requests.remote("", 0), timeout=20)
        except ray.exceptions.RayActorError:
            return
        deadline.sleep(0.05)


def test_a_producer_that_is_killed_between_rounds(ranks: BorrowRanks) -> None:
    """A round does without it; the next link has a new one."""
    workers, trainers = ranks(1), ranks(2)
    client = serve(workers, model, NAMES)
    fleet = Trainers(trainers, client, boxes, METADATA, **SMALL).opened()
    fleet.send(1)
    trainers[1].call(kill_producer)
    assert not fleet.send(2)["reinitialised"]
    check(workers, 2)
    (more,) = ranks(1)
    fleet.each(drive, FanoutClient([client, serve([more], model, NAMES)]))
    assert fleet.send(3)["reinitialised"]
    check([*workers, more], 3)
    fleet.close()


# In one process, in which the agent reads from itself while others use it


def serve_itself(state: State) -> list[bool]:
    found = []
    for _ in range(8):
        trained, served = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        info = ShardedRDTTrainerInitInfo(timeout=20.0)
        engine = WeightTransferTrainerFactory.trainer_init(
            info, client=LocalClient(Worker(served)), source=ModuleSource(trained)
        )
        engine.send_weights()
        found.append(torch.equal(trained.weight, served.weight))
        engine.shutdown()
    return found


def test_a_trainer_that_serves_itself(ranks: BorrowRanks) -> None:
    assert ranks(1)[0].call(serve_itself) == [True] * 8


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["ray_nixl", "object_store"])
def test_a_producer_that_carries_references_and_dies(ranks: BorrowRanks, way: str) -> None:
    workers, trainers = ranks(1), ranks(2)
    fleet = Trainers(trainers, serve(workers, model, NAMES), boxes, METADATA, tensor_transport=way, **SMALL).opened()
    fleet.send(1)
    trainers[1].call(kill_producer)
    errors = fleet.send_in_vain(2)
    assert all(isinstance(error, PeerLost) for error in errors)
    assert any("the producer of trainer rank 1 is gone" in str(error) for error in errors)
    check(workers, 1)
    assert fleet.send(3)["reinitialised"]
    check(workers, 3)
    fleet.close()


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["ray_nixl", "gloo", "object_store"])
def test_a_trainer_rank_that_is_killed_in_the_middle(ranks: BorrowRanks, way: str) -> None:
    workers, trainers = ranks(1), ranks(2)
    fleet = Trainers(trainers, serve(workers, model, NAMES), boxes, METADATA, tensor_transport=way, **SMALL).opened()
    fleet.send(1)
    source_stops = trainers[1].start(stop_before_sending)
    errors = [call.exception() for call in [rank.start(send, 2) for rank in trainers]]
    source_stops.exception()
    assert isinstance(errors[0], PeerLost)
    assert "trainer rank 1" in str(errors[0])
    check(workers, 1)
    assert workers[0].call(info)["weights"] == "whole"


def stop_before_sending(state: State) -> None:
    """End this process when its source is next asked for something."""

    def end() -> Iterator[tuple[str, Tensor]]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield from ()

    state["source"].iter_local = end
    state["source"].resident = lambda: None
