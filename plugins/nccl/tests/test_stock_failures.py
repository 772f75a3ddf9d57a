"""A trainer on vLLM's NCCL wire when something fails: it ends soon, says why, and the next round starts anew."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest
import torch

from plugins.nccl.tests.stock_scene import Counting, GlooTrainer, Mixed, Server, StockWorker, same, trainer
from weightwire.errors import DeadlineExceeded, SourceMismatch, TransferError
from weightwire.layout import ParamMeta
from weightwire.source import StateDictSource, WeightSource
from weightwire.testing.fixtures import BorrowRanks
from weightwire_nccl import NCCLTrainerInitInfo

LIMIT = 5.0


@pytest.fixture
def worker() -> Iterator[Counting]:
    made = Counting()
    yield made
    made.close()


def large() -> StateDictSource:
    """More than sockets hold, so that nobody can send it to nobody."""
    return StateDictSource({"a": torch.ones(4 << 20), "b": torch.ones(4 << 20)})


def test_a_failed_update_ends_a_broadcast_that_is_blocked(worker: Counting) -> None:
    sender = trainer(worker, large())
    worker.fail = "update"
    began = time.monotonic()
    with pytest.raises(TransferError, match="update failed with 404 .a vLLM server needs VLLM_SERVER_DEV_MODE=1"):
        sender.send_weights()
    assert time.monotonic() - began < LIMIT
    assert sender.log[-1] == "abort"
    assert not sender.linked
    worker.fail, worker.calls = None, []
    report = sender.send_weights(weight_version="again")
    assert report.reinitialised
    # What the server may still have open is ended, and the old communicator given up there, before a new one is made.
    assert worker.calls == ["finish", "shutdown", "init", "start", "update", "finish again"]
    assert len({one.unique_id for one in sender.broadcasters}) == 2
    assert torch.equal(worker.weights["b"], torch.ones(4 << 20))
    assert not sender.send_weights().reinitialised
    sender.shutdown()


@pytest.mark.parametrize("step", ["start", "finish"])
def test_a_failed_call_before_or_after_the_bytes(worker: Counting, step: str) -> None:
    sender = trainer(worker, Mixed(1.0))
    worker.fail = step
    with pytest.raises(TransferError, match=f"{step} failed"):
        sender.send_weights()
    worker.fail, worker.calls = None, []
    assert sender.send_weights().reinitialised
    assert worker.calls == ["finish", "shutdown", "init", "start", "update", "finish"]
    assert same(worker.weights, Mixed(1.0))
    sender.shutdown()


def test_a_server_that_cannot_leave_is_initialised_all_the_same() -> None:
    class Stubborn(Counting):
        def shutdown_weight_transfer_engine(self) -> None:
            self.close()
            raise RuntimeError("Cannot release a trainer connection during a weight update")

    worker = Stubborn()
    sender = trainer(worker, Mixed(1.0))
    worker.fail = "start"
    with pytest.raises(TransferError):
        sender.send_weights()
    worker.fail = None
    assert sender.send_weights().reinitialised
    sender.shutdown()
    worker.close()


def test_a_failed_init_ends_the_wait_for_the_workers() -> None:
    began = time.monotonic()
    with pytest.raises(TransferError, match="init failed with 404.*vLLM 0.32 or later"):
        trainer(StockWorker(fail="init"), Mixed(), world_size=2)
    assert time.monotonic() - began < LIMIT


def test_a_worker_that_never_joins_is_not_waited_for_beyond_the_deadline() -> None:
    class Absent(StockWorker):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            self.deadline.sleep(3.0)

    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="the workers to join"):
        trainer(Absent(), Mixed(), world_size=2, timeout=0.5)
    assert time.monotonic() - began < LIMIT


def test_a_worker_that_is_killed_ends_the_round(ranks: BorrowRanks) -> None:
    workers = ranks(2)
    sender = trainer(Server(workers), large())
    sender.send_weights()
    workers[1].kill()
    began = time.monotonic()
    with pytest.raises(TransferError):
        sender.send_weights()
    assert time.monotonic() - began < LIMIT


class Late(WeightSource):
    """Turns out only half-way to be something else than it declares."""

    def __init__(self) -> None:
        self.wrong = True

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta("a", torch.float32, (2,)), ParamMeta("b", torch.float32, (2,))]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        yield ("c" if self.wrong else "b"), torch.ones(2)


def test_a_source_that_fails_half_way_ends_the_round(worker: Counting) -> None:
    source = Late()
    sender = trainer(worker, source, packed=False)
    began = time.monotonic()
    with pytest.raises(SourceMismatch, match="'c'"):
        sender.send_weights()
    assert time.monotonic() - began < LIMIT
    worker.close()  # as if the server had been started anew
    source.wrong = False
    assert sender.send_weights().reinitialised
    sender.shutdown()


# Several trainer ranks


class Gathered(WeightSource):
    """Every parameter is gathered from all trainer ranks, which have to iterate together."""

    def __init__(self, rank: int, *, wrong: bool) -> None:
        self._rank, self._wrong, self.gathers = rank, wrong, 0

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(f"p{place}", torch.float32, (1 << 20,)) for place in range(6)]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        from torch import distributed

        for place in range(6):
            tensor = torch.full((1 << 20,), float(place * (self._rank + 1)))
            distributed.all_reduce(tensor)
            self.gathers += 1
            yield (f"q{place}" if self._wrong and place == 5 else f"p{place}"), tensor


def rank_trainer(state: dict[str, Any], rank: int, folder: str, fail: str | None, wrong: int | None) -> Any:
    """One of two trainer ranks; rank 0 has a worker in its own process."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    worker = Counting()
    source = Gathered(rank, wrong=rank == wrong)
    sender = None
    try:
        info = NCCLTrainerInitInfo(wire="vllm", rank=rank, timeout=20.0, packed=False, num_trainer_ranks=2)
        sender = GlooTrainer.trainer_init(info, client=worker, source=source)
        worker.fail = fail
        try:
            sender.send_weights()
            told = None
        except Exception as error:  # noqa: BLE001 - told to the test
            told = f"{type(error).__name__}: {error}"
        got = [float(tensor[0]) for tensor in worker.weights.values()]
        return told, worker.calls, got, source.gathers, hasattr(sender, "broadcasters")
    finally:
        if sender is not None:
            sender.shutdown()
        worker.close()
        distributed.destroy_process_group()


def run_both(ranks: BorrowRanks, folder: Any, *, fail: str | None = None, wrong: int | None = None) -> list[Any]:
    pending = [one.start(rank_trainer, place, str(folder), fail, wrong) for place, one in enumerate(ranks(2))]
    return [one.result() for one in pending]


def test_other_trainer_ranks_gather_and_stay_out_of_the_communicator(ranks: BorrowRanks, tmp_path: Any) -> None:
    first, second = run_both(ranks, tmp_path)
    assert first == (None, ["init", "start", "update", "finish"], [place * 3.0 for place in range(6)], 6, True)
    assert second == (None, [], [], 6, False)


def test_a_failed_call_is_heard_on_every_rank_once_their_gathers_are_over(ranks: BorrowRanks, tmp_path: Any) -> None:
    for told, _, _, gathers, _ in run_both(ranks, tmp_path, fail="update"):
        assert "update failed with 404" in told
        assert gathers == 6


def test_a_wrong_source_on_another_rank_is_heard_on_every_rank(ranks: BorrowRanks, tmp_path: Any) -> None:
    for told, calls, *_ in run_both(ranks, tmp_path, wrong=1):
        assert told.startswith("SourceMismatch")
        assert "'q5'" in told
        assert "finish" not in calls
