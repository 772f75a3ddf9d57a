"""Dense weights between processes: every byte arrives, on every worker, or nobody changes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from plugins.nccl.tests.fleet import Zoo, checksums, close, hold_port, model_checksums, open_trainer, send, weights
from weightwire.clients.fanout import FanoutClient
from weightwire.clients.local import LocalClient
from weightwire.errors import (
    HandshakeError,
    MessageError,
    MetadataError,
    OrderError,
    SourceMismatch,
    TransportNotFound,
    UpdateRefused,
)
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource, StateDictSource, WeightSource
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.workers import host_workers
from weightwire.worker import Worker
from weightwire_nccl import NCCLTrainerInitInfo


def trainer(client: Any, source: WeightSource | None, **info: Any) -> Any:
    return WeightTransferTrainerFactory.trainer_init(NCCLTrainerInitInfo(**info), client=client, source=source)


@pytest.mark.parametrize("packed", [True, False])
def test_one_trainer_to_one_worker_in_this_process(packed: bool) -> None:
    theirs, mine = Zoo(0), Zoo(1)
    worker = Worker(theirs)
    engine = trainer(LocalClient(worker), ModuleSource(mine), packed=packed, checksum=True)
    before = worker.info()["revision"]
    report = engine.send_weights(weight_version="step-1")
    assert checksums(theirs) == checksums(mine)
    assert worker.info()["weight_version"] == "step-1"
    assert report.revision == worker.info()["revision"] != before
    assert report.bytes == sum(p.numel() * p.dtype.itemsize for p in mine.parameters())
    assert report.verified
    assert [rank.rank for rank in report.ranks] == ["trainer rank 0", "worker rank 0"]
    engine.shutdown()
    assert worker.state == "uninitialised"
    worker.shutdown()


@pytest.mark.parametrize("collective", [False, True], ids=["point-to-point", "collective"])
def test_many_rounds_to_two_servers(ranks: BorrowRanks, collective: bool) -> None:
    sender, *workers = ranks(3)
    client = FanoutClient([host_workers([worker], weights) for worker in workers])
    sender.call(open_trainer, client, collective=collective)
    for number in range(4):
        sent = sender.call(send, f"step-{number}", step=True)
        for worker in workers:
            assert worker.call(model_checksums) == sent["checksums"]
    assert client.weight_info()["weight_version"] == "step-3"
    assert sent["report"]["round"] == 3
    assert sent["report"]["previous"]["number"] == 3
    sender.call(close)


def test_a_server_of_two_ranks(ranks: BorrowRanks) -> None:
    sender, *workers = ranks(3)
    client = host_workers(workers, weights)
    sender.call(open_trainer, client)
    sent = sender.call(send)
    assert [worker.call(model_checksums) for worker in workers] == [sent["checksums"]] * 2
    sender.call(close)


@pytest.mark.parametrize("owned", [False, True], ids=["replicated", "owned-in-turn"])
def test_several_trainer_ranks(ranks: BorrowRanks, owned: bool) -> None:
    first, second, *workers = ranks(4)
    client = FanoutClient([host_workers([worker], weights) for worker in workers])
    port = first.call(hold_port)
    opening = [
        rank.start(open_trainer, client, rank=place, count=2, owned=owned, port=port)
        for place, rank in enumerate((first, second))
    ]
    for call in opening:
        call.result()
    for _ in range(2):
        sending = [rank.start(send, "x", step=True) for rank in (first, second)]
        sent = [call.result() for call in sending]
        for worker in workers:
            assert worker.call(model_checksums) == sent[0]["checksums"]
    senders = {rank["rank"]: rank["bytes"] for rank in sent[0]["report"]["ranks"]}
    assert (senders["trainer rank 1"] > 0) == owned
    assert sent[0]["report"]["revision"] == sent[1]["report"]["revision"]
    for rank in (first, second):
        rank.start(close).result()


def test_a_tensor_larger_than_every_buffer() -> None:
    theirs, mine = Zoo(0), Zoo(1)
    worker = Worker(theirs)
    engine = trainer(LocalClient(worker), ModuleSource(mine), packed_buffer_size_bytes=mine.wide.nbytes * 2 // 7)
    engine.send_weights()
    assert checksums(theirs) == checksums(mine)
    engine.shutdown()


class Refusing(nn.Module):
    """A model that differs from the trainer's in one way."""

    def __init__(self, shape: tuple[int, ...] = (4, 4), dtype: str = "float32", extra: bool = False) -> None:
        super().__init__()
        import torch

        self.weight = nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype)))
        if extra:
            self.bias = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("theirs", "mine", "words"),
    [
        (Refusing(), Refusing(extra=True), "bias"),
        (Refusing(extra=True), Refusing(), "bias"),
        (Refusing(), Refusing(shape=(4, 5)), "weight"),
        (Refusing(), Refusing(dtype="bfloat16"), "weight"),
    ],
    ids=["unknown name", "missing name", "wrong shape", "wrong dtype"],
)
def test_a_model_that_does_not_fit_is_refused_before_a_byte_moves(
    theirs: nn.Module, mine: nn.Module, words: str
) -> None:
    worker = Worker(theirs)
    before = checksums(theirs)
    engine = trainer(LocalClient(worker), ModuleSource(mine))
    for _ in range(2):
        with pytest.raises(UpdateRefused, match=words):
            engine.send_weights()
        assert checksums(theirs) == before
        assert worker.state == "ready"
    good = Refusing(extra=hasattr(theirs, "bias"))
    engine.shutdown()
    engine = trainer(LocalClient(worker), ModuleSource(good))
    engine.send_weights()
    assert checksums(theirs) == checksums(good)
    engine.shutdown()


def test_a_source_that_is_not_what_it_declared() -> None:
    theirs, mine = Zoo(0), Zoo(1)
    worker = Worker(theirs)
    before = checksums(theirs)
    state = dict(mine.named_parameters())
    source = StateDictSource(lambda: state)
    engine = trainer(LocalClient(worker), source)
    good = state.pop("sixteen")
    with pytest.raises(SourceMismatch, match="'sixteen'"):
        engine.send_weights()
    assert checksums(theirs) == before
    assert worker.info()["weights"] == "whole"
    state.clear()
    state.update(dict(mine.named_parameters()), sixteen=good)
    report = engine.send_weights()
    assert report.reinitialised
    assert checksums(theirs) == checksums(mine)
    engine.shutdown()


def test_numbers_that_do_not_add_up() -> None:
    client = LocalClient(Worker(Zoo(0)))
    with pytest.raises(MessageError, match="world_size 4 is not 1 senders plus"):
        trainer(client, ModuleSource(Zoo(1)), world_size=4)
    with pytest.raises(MessageError, match="common secret"):
        trainer(client, ModuleSource(Zoo(1)), num_trainer_ranks=2)
    with pytest.raises(MetadataError, match="needs a source"):
        trainer(client, None)
    with pytest.raises(MessageError, match="16 bytes in hex"):
        trainer(client, ModuleSource(Zoo(1)), secret="short")


def test_a_worker_that_never_comes_is_named() -> None:
    class Silent(LocalClient):
        def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
            return None

    with pytest.raises(TimeoutError, match="worker rank 0"):
        trainer(Silent(Worker(Zoo(0))), ModuleSource(Zoo(1)), timeout=1.0)


def test_an_unknown_backend_says_what_is_installed() -> None:
    worker = Worker(Zoo(0), backend="carrier_pigeon")
    with pytest.raises((TransportNotFound, HandshakeError), match="carrier_pigeon"):
        trainer(LocalClient(worker), ModuleSource(Zoo(1)))
    assert worker.state == "uninitialised"


def test_a_second_trainer_needs_takeover_while_the_first_is_alive() -> None:
    theirs, mine, other = Zoo(0), Zoo(1), Zoo(2)
    client = LocalClient(Worker(theirs))
    first = trainer(client, ModuleSource(mine))
    with pytest.raises(OrderError, match="takeover"):
        trainer(client, ModuleSource(other))
    second = trainer(client, ModuleSource(other), takeover=True)
    second.send_weights()
    assert checksums(theirs) == checksums(other)
    with pytest.raises(OrderError, match="takeover"):
        first.send_weights()
    first.shutdown()
    second.shutdown()
