"""Sinks of sharded models, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.tests import sink_ranks
from weightwire.testing.fixtures import BorrowRanks

OPTIONS: list[dict[str, Any]] = [{}, {"staging": "in_place"}]


def on_ranks(ranks: BorrowRanks, count: int, path: Path, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    lent = ranks(count)
    calls = [rank.start(sink_ranks.join, index, count, str(path / "store")) for index, rank in enumerate(lent)]
    for call in calls:
        call.result()
    calls = [rank.start(function, *args, **kwargs) for rank in lent]
    results = [call.result() for call in calls]
    for call in [rank.start(sink_ranks.leave) for rank in lent]:
        call.result()
    return results


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("function", [sink_ranks.fsdp, sink_ranks.fsdp_root_only])
def test_fsdp(ranks: BorrowRanks, tmp_path: Path, function: Callable[..., None], options: dict[str, Any]) -> None:
    on_ranks(ranks, 2, tmp_path, function, options)


@pytest.mark.parametrize("options", OPTIONS)
def test_tensor_parallel(ranks: BorrowRanks, tmp_path: Path, options: dict[str, Any]) -> None:
    on_ranks(ranks, 2, tmp_path, sink_ranks.tensor_parallel, options, shard=False)


def test_fsdp_over_tensor_parallel(ranks: BorrowRanks, tmp_path: Path) -> None:
    on_ranks(ranks, 4, tmp_path, sink_ranks.tensor_parallel, {}, shard=True)


def test_every_pair_of_placements(ranks: BorrowRanks, tmp_path: Path) -> None:
    on_ranks(ranks, 4, tmp_path, sink_ranks.placements)


def test_partial_is_refused(ranks: BorrowRanks, tmp_path: Path) -> None:
    assert all("no plain piece" in words for words in on_ranks(ranks, 2, tmp_path, sink_ranks.refused))
