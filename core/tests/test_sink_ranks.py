"""Sinks of sharded models, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.tests import sink_ranks
from weightwire.testing.fixtures import BorrowRanks


def on_ranks(ranks: BorrowRanks, count: int, path: Path, function: Callable[..., None], *args: object) -> None:
    """Run `function` on `count` ranks of one process group."""
    lent, store = ranks(count), str(path / "store")
    for call in [rank.start(sink_ranks.join, index, count, store) for index, rank in enumerate(lent)]:
        call.result()
    for call in [rank.start(function, *args) for rank in lent]:
        call.result(60)
    for call in [rank.start(sink_ranks.leave) for rank in lent]:
        call.result()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("options", [{}, {"staging": "in_place"}])
def test_sharded_models_on_two_ranks(ranks: BorrowRanks, tmp_path: Path, options: dict[str, Any]) -> None:
    on_ranks(ranks, 2, tmp_path, sink_ranks.all_on_two, options)


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_two_mesh_axes_on_four_ranks(ranks: BorrowRanks, tmp_path: Path) -> None:
    on_ranks(ranks, 4, tmp_path, sink_ranks.all_on_four)
