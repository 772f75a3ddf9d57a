"""The checks of `cuda_check`, on one GPU and with less."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from plugins.ipc.tests import cuda_check
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool import Rank, RankPool
from weightwire_ipc.device import counted, disown_export, export_storage, release_exports

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]


@pytest.fixture
def fresh(pool: RankPool) -> Iterator[BorrowRanks]:
    """Ranks that have not touched the GPU, and that are gone afterwards."""
    borrowed: list[Rank] = []

    def borrow(count: int) -> list[Rank]:
        more = pool.borrow(count, fresh=True)
        borrowed.extend(more)
        return more

    yield borrow
    for rank in borrowed:
        rank.kill()
    pool.give_back(borrowed)


@pytest.mark.parametrize("packed", [True, False])
def test_rounds(fresh: BorrowRanks, packed: bool) -> None:
    cuda_check.check_rounds(fresh, packed=packed, rounds=6)


@pytest.mark.parametrize("point", ["worker.begin", "worker.received", "worker.vote"])
def test_a_killed_worker(fresh: BorrowRanks, point: str) -> None:
    cuda_check.check_kill(fresh, point=point)


@pytest.mark.parametrize("pickled", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_a_stock_trainer(fresh: BorrowRanks, packed: bool, pickled: bool) -> None:
    cuda_check.check_stock(fresh, packed=packed, pickled=pickled, rounds=3)


def abandon(state: cuda_check.State) -> tuple[int, int, int]:
    """Export, give the export up as if its importer had died; returns the counter then and before, and what stays."""
    before = torch.cuda.memory_allocated()
    memory = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    export = export_storage(memory.untyped_storage())
    alive = counted(export)
    disown_export(export)
    dead = counted(export)
    del memory, export
    release_exports()
    return alive, dead, torch.cuda.memory_allocated() - before


def test_an_export_whose_importer_died_is_given_up(fresh: BorrowRanks) -> None:
    (rank,) = fresh(1)
    assert rank.call(abandon) == (1, 0, 0)
