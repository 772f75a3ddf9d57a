"""What a plan follows from changes between rounds: the link is opened again, and planned anew where it has to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from core.tests.sharded_fleet import (
    boxes,
    change,
    close_host,
    details_of,
    digests,
    drive,
    held,
    info,
    loaded,
    named,
    plans_made,
    sent_by,
    serve,
    whole,
)
from plugins.m2n.tests.fleet import Trainers
from weightwire.clients.fanout import FanoutClient
from weightwire.errors import UpdateRefused
from weightwire.layout import ParamMeta, Shard
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank

METADATA = [
    ParamMeta("rows", torch.float32, (5, 6), owners=(0, 1), placements=(Shard(0),)),
    ParamMeta("columns", torch.bfloat16, (4, 7), owners=(1, 0), placements=(Shard(1),)),
    ParamMeta("shared", torch.float64, (9,)),
]
NAMES = ["rows", "columns", "shared"]


def check(workers: list[Rank], seed: int) -> None:
    for rank in workers:
        assert rank.call(held) == loaded(METADATA, NAMES, seed)


def linked(ranks: BorrowRanks, workers: list[Rank]) -> Trainers:
    """Two trainer ranks, with a round behind them."""
    fleet = Trainers(ranks(2), serve(workers, named, METADATA, [NAMES] * len(workers)), boxes, METADATA).opened()
    assert not fleet.send(1)["reinitialised"]
    check(workers, 1)
    assert fleet.each(plans_made) == [1, 1]
    return fleet


@pytest.mark.parametrize("before_after", [(2, 1), (1, 3)])
def test_a_server_that_comes_back_with_another_number_of_ranks(
    ranks: BorrowRanks, before_after: tuple[int, int]
) -> None:
    before, after = before_after
    old = ranks(before)
    fleet = linked(ranks, old)
    for rank in old:
        rank.kill()
    new = ranks(after)
    fleet.each(drive, serve(new, named, METADATA, [NAMES] * after))
    for seed in (2, 3):
        report = fleet.send(seed)
        assert report["reinitialised"] == (seed == 2)
        check(new, seed)
    assert len(sent_by(report, "worker rank")) == after
    assert fleet.each(plans_made) == [2, 2]
    fleet.close()


def test_a_link_that_is_lost_and_opened_alike_keeps_its_plan(ranks: BorrowRanks) -> None:
    stays, goes = ranks(2)
    servers = [serve([rank], named, METADATA, [NAMES]) for rank in (stays, goes)]
    fleet = Trainers(ranks(2), FanoutClient(servers), boxes, METADATA).opened()
    fleet.send(1)
    goes.kill()
    (comes,) = ranks(1)
    fleet.each(drive, FanoutClient([servers[0], serve([comes], named, METADATA, [NAMES])]))
    report = fleet.send(2)
    assert report["reinitialised"]
    check([stays, comes], 2)
    assert fleet.each(plans_made) == [1, 1]
    comes.call(close_host)  # it leaves, as a server does that is shut down
    fleet.each(drive, FanoutClient([servers[0], serve([comes], named, METADATA, [NAMES])]))
    assert fleet.send(3)["reinitialised"]
    check([stays, comes], 3)
    assert fleet.each(plans_made) == [1, 1]
    fleet.close()


# A worker's model that is laid out anew


def turn(model: Any) -> None:
    """Other strides: what is received lands elsewhere, and looks the same."""
    model.rows = nn.Parameter(torch.zeros(6, 5).t())


def widen(model: Any) -> None:
    """Another dtype: from now on the loader has to cast."""
    model.rows = nn.Parameter(torch.zeros(5, 6, dtype=torch.float64))


def shrink(model: Any) -> None:
    """One parameter less."""
    del model.rows


@pytest.mark.parametrize("function", [turn, widen])
def test_a_model_that_was_laid_out_anew_is_planned_anew(ranks: BorrowRanks, function: Callable[[Any], None]) -> None:
    workers = ranks(2)
    fleet = linked(ranks, workers)
    workers[1].call(change, function)
    report = fleet.send(2)
    assert report["reinitialised"]
    assert fleet.each(plans_made) == [2, 2]
    check(workers[:1], 2)
    expected = loaded_after(function, 2)
    assert workers[1].call(held) == expected
    assert bool(details_of(report, 1)["opaque"]) == (function is widen)
    again = fleet.send(3)
    assert not again["reinitialised"]
    assert workers[1].call(held) == loaded_after(function, 3)
    assert fleet.each(plans_made) == [2, 2]
    fleet.close()


def loaded_after(function: Callable[[Any], None], seed: int) -> dict[str, str]:
    model = named({}, 0, 1, METADATA, [NAMES])
    function(model)
    model.load_weights(whole(METADATA, seed).items())
    return digests(model)


def test_a_model_that_takes_less_than_before(ranks: BorrowRanks) -> None:
    """The link is opened again, and what nobody takes any more is named."""
    workers = ranks(1)
    fleet = linked(ranks, workers)
    workers[0].call(change, shrink)
    before = workers[0].call(held)
    errors = fleet.send_in_vain(2)
    assert all("no worker takes parameter 'rows'" in str(error) for error in errors)
    assert isinstance(errors[0], UpdateRefused)
    assert workers[0].call(held) == before
    assert workers[0].call(info)["weights"] == "whole"
    workers[0].call(change, turn)
    assert fleet.send(3)["reinitialised"]
    assert workers[0].call(held) == loaded_after(turn, 3)
    fleet.close()


class Plain(nn.Module):
    """Holds everything under its own name, and has no loader."""

    def __init__(self) -> None:
        super().__init__()
        for meta in METADATA:
            self.register_parameter(meta.name, nn.Parameter(torch.zeros(meta.shape, dtype=meta.dtype)))


def plain(state: dict[str, Any], index: int, count: int) -> nn.Module:
    return Plain()


def test_a_plain_module_lands_alike_whatever_its_strides(ranks: BorrowRanks) -> None:
    (worker,) = ranks(1)
    fleet = Trainers(ranks(2), serve([worker], plain), boxes, METADATA).opened()
    fleet.send(1)
    worker.call(change, turn)
    assert not fleet.send(2)["reinitialised"]
    check([worker], 2)
    worker.call(change, widen)
    before = worker.call(held)
    for error in fleet.send_in_vain(3):
        assert isinstance(error, UpdateRefused)
        assert "'rows'" in str(error)
    assert worker.call(held) == before
    worker.call(change, turn)
    assert not fleet.send(4)["reinitialised"]
    check([worker], 4)
    assert fleet.each(plans_made) == [1, 1]
    fleet.close()
