"""Weights from the layouts that trainers have to those that servers have, between real processes."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from core.tests.distributed_ranks import process_group
from core.tests.sharded_fleet import (
    BoxSource,
    Pairs,
    State,
    boxes,
    close_host,
    details_of,
    digests,
    held,
    info,
    loaded,
    named,
    plans_made,
    sent_by,
    serve,
    whole,
)
from core.tests.sharded_models import (
    HIDDEN,
    check_served,
    flat,
    hybrid,
    served,
    sharded,
    two_ways,
)
from core.tests.sink_models import same_bits
from plugins.m2n.tests.fleet import Trainers
from weightwire.clients.fanout import FanoutClient
from weightwire.errors import SourceMismatch, UpdateRefused
from weightwire.layout import ParamMeta, Placement, Replicate, Shard, total_bytes
from weightwire.source import WeightSource
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank


@pytest.mark.parametrize("shard", [flat, hybrid, two_ways])
def test_four_ranks_to_a_tensor_parallel_server(
    ranks: BorrowRanks, tmp_path: Path, shard: Callable[[nn.Module, int], None]
) -> None:
    with process_group(ranks, 4, tmp_path) as group:
        workers = ranks(2)
        client = serve(workers, served)
        trainers = Trainers(group.ranks, client, sharded, shard, buffer_bytes=300, direct_bytes=200).opened()
        for seed in range(1, 4):
            report = trainers.send(seed, f"step-{seed}")
            check_served(report, workers, seed)
            if seed > 1:
                assert [details_of(report, index)["allocated_bytes"] for index in range(2)] == [0, 0]
        assert client.weight_info()["weight_version"] == "step-3"
        assert [details_of(report, 1)["opaque"], details_of(report, 1)["unfilled"]] == [[], {"embed": HIDDEN * 2}]
        assert trainers.each(plans_made) == [1] * 4
        assert min(sent_by(report, "trainer rank")) > 0
        trainers.close()


# Other layouts


def bf16(name: str, *shape: int, owners: tuple[int, ...] | None = None, mesh: tuple[int, ...] | None = None,
         placements: tuple[Placement, ...] | None = None) -> ParamMeta:  # fmt: skip
    return ParamMeta(name, torch.bfloat16, shape, owners=owners, mesh_shape=mesh, placements=placements)


def check_named(workers: list[Rank], metadata: list[ParamMeta], takes: list[list[str]], seed: int) -> None:
    for rank, names in zip(workers, takes, strict=True):
        assert rank.call(held) == loaded(metadata, names, seed)


def test_pipeline_stages_and_experts(ranks: BorrowRanks) -> None:
    """Two stages of two ranks; each worker loads its own experts, and two servers are replicas of each other."""
    *trainers, one, two, three, four = ranks(8)
    metadata = [
        bf16("stage0", 9, 4, owners=(0, 1), mesh=(2,), placements=(Shard(0),)),
        bf16("stage1", 9, 4, owners=(3, 2), mesh=(2,), placements=(Shard(1),)),
        *(bf16(f"expert{number}", 40, 4, owners=(number % 4,)) for number in range(8)),
        bf16("shared", 50, 2, owners=(0, 1, 2, 3), mesh=(2, 2), placements=(Replicate(), Shard(0))),
    ]
    common = ["stage0", "stage1", "shared"]
    takes = [common + [f"expert{number}" for number in range(8) if number // 4 == half] for half in (0, 1)]
    workers = [one, two, three, four]
    client = FanoutClient([serve(workers[place : place + 2], named, metadata, takes) for place in (0, 2)])
    fleet = Trainers(trainers, client, boxes, metadata, buffer_bytes=128, direct_bytes=1000, checksum=True).opened()
    for seed in (1, 2):
        report = fleet.send(seed)
        check_named(workers, metadata, takes * 2, seed)
    by_name = {meta.name: meta.nbytes for meta in metadata}
    assert sent_by(report, "worker rank") == [sum(by_name[name] for name in names) for names in takes * 2]
    # Whoever holds the same half of what is shared sends it in turn.
    alone = [sum(meta.nbytes for meta in metadata[2:10] if meta.owners == (rank,)) * 2 for rank in range(4)]
    stages = [4 * (5 * 4 * 2), 4 * (4 * 4 * 2), 4 * (9 * 2 * 2), 4 * (9 * 2 * 2)]
    shares = [
        sent - one - other for sent, one, other in zip(sent_by(report, "trainer rank"), alone, stages, strict=True)
    ]
    assert sum(shares) == 4 * by_name["shared"]
    assert all(shares)
    fleet.close()


def test_replicas_share_the_sending(strict_ranks: BorrowRanks) -> None:
    first, second, *workers = strict_ranks(4)
    metadata = [bf16(f"w{number}", 30, owners=(0, 1)) for number in range(4)] + [bf16("everywhere", 30)]
    takes = [[meta.name for meta in metadata]] * 2
    client = FanoutClient([serve([rank], named, metadata, takes) for rank in workers])
    fleet = Trainers([first, second], client, boxes, metadata).opened()
    report = fleet.send(1)
    check_named(workers, metadata, takes, 1)
    assert sent_by(report, "trainer rank") == [total_bytes(metadata)] * 2
    assert "2 of 2 ranks sending to 2" in report["path"]
    fleet.close()


def test_who_has_nothing_to_send_or_to_receive(ranks: BorrowRanks) -> None:
    """A trainer rank that holds nothing, one that is never chosen, and a worker that wants nothing."""
    *trainers, one, two = ranks(5)
    metadata = [bf16("tiny", 1, owners=(2, 1)), bf16("more", 64, owners=(1,)), bf16("none", 0, 3)]
    takes = [["tiny", "more", "none"], []]
    client = serve([one, two], named, metadata, takes)
    fleet = Trainers(trainers, client, boxes, metadata, checksum=True).opened()
    for seed in (1, 2):
        report = fleet.send(seed)
        check_named([one, two], metadata, takes, seed)
    assert sent_by(report, "trainer rank") == [
        0,
        130 - 2 * (report["ranks"][2]["bytes"] > 0),
        report["ranks"][2]["bytes"],
    ]
    assert sent_by(report, "worker rank") == [130, 0]
    fleet.close()


def test_only_some_of_the_model(ranks: BorrowRanks) -> None:
    trainer, worker = ranks(2)
    everything = [bf16("a", 5, 3), bf16("b", 7), bf16("c", 4)]
    takes = [["a", "b", "c"]]
    client = serve([worker], named, everything, takes)
    fleet = Trainers([trainer], client, boxes, everything).opened()
    fleet.send(1)
    before = worker.call(held)
    part = Trainers([trainer], client, boxes, everything[1:2], "partial", takeover=True).opened()
    report = part.send(2)
    assert report["scope"] == "partial"
    assert sent_by(report, "worker rank") == [14]
    after = worker.call(held)
    assert after["b"] != before["b"]
    assert (after["a"], after["c"]) == (before["a"], before["c"])
    part.close()


# Sources


class CountingSource(BoxSource):
    """Makes each tensor when it is asked for, and counts how many there are at once."""

    alive = 0
    most = 0

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().iter_local():
            memory = tensor.contiguous().view(torch.uint8).numpy().copy()
            weakref.finalize(memory, self.freed)
            self.alive += 1
            self.most = max(self.most, self.alive)
            yield name, torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)
            del memory

    def freed(self) -> None:
        self.alive -= 1


def counting(state: State, rank: int, count: int, metadata: list[ParamMeta]) -> WeightSource:
    return CountingSource(metadata, rank)


def most_alive(state: State) -> tuple[int, int]:
    source: CountingSource = state["source"]
    return source.most, source.alive


@pytest.mark.parametrize("direct_bytes", [1, 1 << 20], ids=["each-by-itself", "together"])
def test_a_source_that_makes_its_tensors_one_by_one(ranks: BorrowRanks, direct_bytes: int) -> None:
    trainer, worker = ranks(2)
    metadata = [bf16(f"w{number}", 32, 64) for number in range(60)]
    takes = [[meta.name for meta in metadata]]
    client = serve([worker], named, metadata, takes)
    fleet = Trainers(
        [trainer], client, counting, metadata, buffer_bytes=4096, num_buffers=2, direct_bytes=direct_bytes
    ).opened()
    fleet.send(1)
    check_named([worker], metadata, takes, 1)
    most, alive = trainer.call(most_alive)
    # Each fills a buffer; two are on their way, and parcels of what is smaller than a buffer are four times as many.
    assert most <= 12
    assert alive == 0
    fleet.close()


class WrongOnce(BoxSource):
    """Yields a wrong local shape while its seed is negative."""

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().iter_local():
            yield name, tensor[:1] if name == "b" and self.seed == 13 and self._rank == 1 else tensor


def wrong_once(state: State, rank: int, count: int, metadata: list[ParamMeta]) -> WeightSource:
    return WrongOnce(metadata, rank)


def test_a_source_that_is_not_what_it_declared(ranks: BorrowRanks) -> None:
    *trainers, worker = ranks(3)
    rows: tuple[Placement, ...] = (Shard(0),)
    metadata = [bf16("a", 6, 2, owners=(0, 1), placements=rows), bf16("b", 9, 2, owners=(0, 1), placements=rows)]
    takes = [["a", "b"]]
    client = serve([worker], named, metadata, takes)
    fleet = Trainers(trainers, client, wrong_once, metadata).opened()
    fleet.send(1)
    before = worker.call(held)
    errors = fleet.send_in_vain(13)
    assert isinstance(errors[1], SourceMismatch)
    for error in errors:
        assert "'b' at index 1 as torch.bfloat16 of shape (1, 2), and declares torch.bfloat16 of shape (4, 2)" in str(
            error
        )
    assert "trainer rank 1" in str(errors[0])
    assert worker.call(held) == before
    assert worker.call(info)["weights"] == "whole"
    assert fleet.send(2)["reinitialised"]
    check_named([worker], metadata, takes, 2)
    fleet.close()


class SlowSource(BoxSource):
    """Takes a while for each tensor, as one that gathers or reads does."""

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for pair in super().iter_local():
            time.sleep(0.6 if self._rank == 0 else 0.0)
            yield pair


def slow(state: State, rank: int, count: int, metadata: list[ParamMeta]) -> WeightSource:
    return SlowSource(metadata, rank)


@pytest.mark.thorough
def test_who_waits_for_others_has_not_stopped(ranks: BorrowRanks) -> None:
    """The first stage is sent for longer than a peer is usually waited for, before it is the second one's turn."""
    *trainers, one, two = ranks(4)
    metadata = [bf16(f"w{place}", 2000, owners=(int(place > 10),)) for place in range(12)]
    takes = [[f"w{place}" for place in range(10)] + ["w11"], ["w10", "w11"]]
    client = serve([one, two], named, metadata, takes)
    fleet = Trainers(trainers, client, slow, metadata, buffer_bytes=4000, num_buffers=1).opened()
    fleet.send(1)
    check_named([one, two], metadata, takes, 1)
    fleet.close()


# Who takes what


def test_a_name_that_nobody_takes(ranks: BorrowRanks) -> None:
    """Refused before anything connects, unless it is declared to be somebody else's."""
    *trainers, one, two = ranks(4)
    metadata = [bf16("a", 6), bf16("vision", 5), bf16("empty", 0)]
    takes = [["a"], []]
    client = serve([one, two], named, metadata, takes)
    refused = Trainers(trainers, client, boxes, metadata)
    for error in refused.errors():
        assert "no worker takes parameter 'vision': declare it foreign, or load with strict=False" in str(error)
    assert isinstance(refused.errors()[0], UpdateRefused)
    fleet = Trainers(trainers, client, boxes, metadata, foreign=["vision"]).opened()
    assert sum(sent_by(fleet.send(1), "worker rank")) == 12
    check_named([one, two], metadata, takes, 1)
    fleet.close()


def test_workers_that_are_not_strict_take_what_they_know(ranks: BorrowRanks) -> None:
    trainer, worker = ranks(2)
    metadata = [bf16("a", 6), bf16("vision", 5)]
    client = serve([worker], named, metadata, [["a"]], strict=False)
    fleet = Trainers([trainer], client, boxes, metadata).opened()
    assert sent_by(fleet.send(1), "worker rank") == [12]
    check_named([worker], metadata, [["a"]], 1)
    fleet.close()


class Casting(nn.Module):
    """One module takes what comes as it is, one casts it."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.cast = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).to(torch.float64)

    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            half = tensor[:4]  # the rest is another rank's
            getattr(self, name.removesuffix(".weight")).weight.data.copy_(half)


def casting(state: State, index: int, count: int) -> nn.Module:
    return Casting()


def test_a_module_that_takes_whole_tensors_alone(ranks: BorrowRanks) -> None:
    first, second, worker = ranks(3)
    placements: tuple[Placement, ...] = (Shard(0),)
    metadata = [
        ParamMeta(f"{name}.weight", torch.float32, (8, 4), owners=(0, 1), placements=placements)
        for name in ("plain", "cast")
    ]
    client = serve([worker], casting)
    fleet = Trainers([first, second], client, boxes, metadata, checksum=True).opened()
    for seed in (1, 2):
        report = fleet.send(seed)
        expected = Casting()
        expected.load_weights(whole(metadata, seed).items())
        assert worker.call(held) == digests(expected)
        assert bool(details_of(report, 0)["allocated_bytes"]) == (seed == 1)
    details = details_of(report, 0)
    assert [module for module, _ in details["opaque"]] == ["cast"]
    assert "float32 is cast to float64" in details["opaque"][0][1]
    assert details["opaque_bytes"] == metadata[1].nbytes
    assert sent_by(report, "worker rank") == [metadata[0].nbytes // 2 + metadata[1].nbytes]
    fleet.close()


class Plain(nn.Module):
    """Holds everything under its own name, and has no loader."""

    def __init__(self, metadata: list[ParamMeta]) -> None:
        super().__init__()
        for meta in metadata:
            self.register_parameter(meta.name, nn.Parameter(torch.zeros(meta.shape, dtype=meta.dtype), False))


def plain(state: State, index: int, count: int, metadata: list[ParamMeta]) -> nn.Module:
    return Plain(metadata)


def test_a_plain_module_is_received_into_second_storages(ranks: BorrowRanks) -> None:
    first, second, worker = ranks(3)
    metadata = [bf16("a", 9, 5, owners=(0, 1), placements=(Shard(1),)), bf16("b", owners=(1,)), bf16("c", 100)]
    fleet = Trainers([first, second], serve([worker], plain, metadata), boxes, metadata).opened()
    for seed in range(1, 5):
        details = details_of(fleet.send(seed), 0)
        assert worker.call(held) == loaded(metadata, ["a", "b", "c"], seed)
        assert (details["swapped"], details["copied"]) == (3, 0)
        assert bool(details["allocated_bytes"]) == (seed <= 2)  # the first storages are the model's own
    fleet.close()


def sharded_plain(state: State, index: int, count: int, metadata: list[ParamMeta]) -> nn.Module:
    model = Plain(metadata)
    flat(model, count)
    return model


def rows_held(state: State) -> dict[str, Tensor]:
    """What this rank holds of its model, and where its box begins."""
    return {name: parameter.to_local().clone() for name, parameter in state["model"].named_parameters()}


@pytest.mark.thorough
def test_a_server_that_is_sharded_itself_is_sent_its_rows(ranks: BorrowRanks, tmp_path: Path) -> None:
    metadata = [bf16("a", 9, 5, owners=(0, 1), placements=(Shard(1),)), bf16("b", 3, 2, owners=(1,)), bf16("c", 100)]
    with process_group(ranks, 2, tmp_path) as group:
        fleet = Trainers(ranks(2), serve(group.ranks, sharded_plain, metadata), boxes, metadata, checksum=True).opened()
        for seed in (1, 2, 3):
            report = fleet.send(seed)
            for index, rank in enumerate(group.ranks):
                rows = rank.call(rows_held)
                for name, tensor in whole(metadata, seed).items():
                    assert same_bits(rows[name], tensor.chunk(2)[index])
            assert sum(sent_by(report, "worker rank")) == total_bytes(metadata)
        fleet.close()
        group.run(close_host)
