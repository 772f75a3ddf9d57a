"""A trainer on vLLM's NCCL wire: what it says, what it broadcasts, and what it refuses to."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import pytest
import torch

from plugins.nccl.tests.stock_http import HTTPServer
from plugins.nccl.tests.stock_scene import (
    Counting,
    Mixed,
    Server,
    StockWorker,
    same,
    trainer,
    worker_state,
)
from weightwire.clients.fanout import FanoutClient
from weightwire.clients.http import HTTPVLLMWeightSyncClient
from weightwire.clients.protocol import VLLMWeightSyncClient
from weightwire.errors import (
    MessageError,
    MetadataError,
    SourceMismatch,
    TransferError,
    TransportUnavailable,
)
from weightwire.layout import ParamMeta
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.report import ProgressEvent
from weightwire.source import ModuleSource, StateDictSource, WeightSource
from weightwire.testing.fixtures import BorrowRanks
from weightwire_nccl import NCCLTrainerInitInfo

KEYS = {
    "rank_offset",
    "world_size",
    "nccl_unique_id_b64",
    "packed",
    "packed_buffer_size_bytes",
    "packed_num_buffers",
}


@pytest.fixture
def worker() -> Iterator[Counting]:
    made = Counting()
    yield made
    made.close()


# Rounds


@pytest.mark.parametrize("packed", [True, False])
def test_rounds_to_two_workers_in_processes_of_their_own(ranks: BorrowRanks, packed: bool) -> None:
    workers, model = ranks(2), Mixed(1.0)
    sender = trainer(Server(workers), model, packed=packed)
    for label, value in (("one", 1.0), ("two", 2.0)):
        model.load_state_dict(Mixed(value).state_dict())
        report = sender.send_weights(weight_version=label)
        assert (report.path, report.verified, report.label) == ("NCCL (vLLM's wire)", False, label)
        assert report.bytes == report.ranks[0].bytes == sum(parameter.nbytes for parameter in model.parameters())
        for one in workers:
            assert same(one.call(worker_state)[2], model)
    calls, init_info, _ = workers[1].call(worker_state)
    assert calls == ["init", "start", "update", "finish one", "start", "update", "finish two"]
    assert (init_info["rank_offset"], init_info["world_size"]) == (1, 3)
    sender.shutdown()


def test_the_messages_have_the_keys_of_vllm_and_no_other(worker: Counting) -> None:
    assert isinstance(worker, VLLMWeightSyncClient)
    sender = trainer(worker, Mixed(1.0))
    assert worker.init_info.keys() == KEYS
    assert len(base64.b64decode(worker.init_info["nccl_unique_id_b64"], validate=True)) == 128
    rest = {key: worker.init_info[key] for key in KEYS - {"nccl_unique_id_b64"}}
    assert rest == {
        "rank_offset": 1,
        "world_size": 2,
        "packed": True,
        "packed_buffer_size_bytes": 1 << 30,
        "packed_num_buffers": 2,
    }
    for _ in range(2):  # also the second time, when vLLM 0.33's own trainer leaves it out
        sender.send_weights()
        assert worker.update_info == {
            "names": ["precise", "wide", "hollow", "scale", "brief", "flags"],
            "dtype_names": ["float64", "float32", "float32", "float32", "bfloat16", "int8"],
            "shapes": [[2, 2], [4, 5], [0, 4], [], [3], [3]],
        }
    assert worker.calls == ["init", *["start", "update", "finish"] * 2]
    sender.shutdown()


def test_unpacked_is_one_broadcast_for_each_parameter_in_its_dtype(worker: Counting) -> None:
    sender = trainer(worker, Mixed(1.0), packed=False)
    sender.send_weights()
    floats = [(torch.float32, 20), (torch.float32, 0), (torch.float32, 1)]
    sent = [(torch.float64, 4), *floats, (torch.bfloat16, 3), (torch.int8, 3)]
    assert sender.log == ["connect 2", "warm up", *sent, "flush"]
    assert worker.loads == [1] * 6
    sender.shutdown()
    assert sender.log[-1] == "abort"


@pytest.mark.parametrize(
    ("sizes", "packs"),
    [
        ([40, 60, 1, 100, 5, 300, 5], [101, 105, 300, 5]),
        ([50, 50], [100]),
        ([50, 50, 0, 0], [100]),
        ([101], [101]),
        ([0], [0]),
        ([], []),
    ],
    ids=str,
)
def test_packs_are_cut_as_vllm_cuts_them(worker: Counting, sizes: list[int], packs: list[int]) -> None:
    state = {f"p{place}": torch.full((size,), place, dtype=torch.uint8) for place, size in enumerate(sizes)}
    sender = trainer(worker, StateDictSource(state), packed_buffer_size_bytes=100)
    sender.send_weights()
    assert [one for one in sender.log if isinstance(one, tuple)] == [(torch.uint8, size) for size in packs]
    assert len(worker.loads) == len(packs)
    assert all(torch.equal(worker.weights[name], tensor) for name, tensor in state.items())
    sender.shutdown()


def test_two_servers_behind_http_are_one_communicator() -> None:
    workers, model = [StockWorker(), StockWorker()], Mixed(1.0)
    with ExitStack() as stack:
        servers = [stack.enter_context(HTTPServer(worker)) for worker in workers]
        clients = [HTTPVLLMWeightSyncClient(server.url) for server in servers]
        sender = trainer(FanoutClient(clients), model)
        events: list[ProgressEvent] = []
        sender.on_progress = events.append
        sender.send_weights(weight_version="one")
        workers[1].fail = "update"
        with pytest.raises(TransferError, match="update failed with 404 .a vLLM server needs"):
            sender.send_weights()
        workers[1].fail = None
        model.load_state_dict(Mixed(2.0).state_dict())
        assert sender.send_weights(weight_version="two").reinitialised
        sender.shutdown()
        for client in clients:
            client.close()
    assert [worker.init_info["rank_offset"] for worker in workers] == [1, 2]
    assert [worker.init_info["world_size"] for worker in workers] == [3, 3]
    assert all(same(worker.weights, model) for worker in workers)
    assert all("abort_weight_update" in server.requests for server in servers)  # a stock one has no such route
    # It told of the round as it went.
    first = [(event.phase, event.bytes_done) for event in events[:5]]
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert first == [("begin", 0), ("transfer", 0), ("transfer", size), ("finish", 0), ("done", 0)]


def test_buffers_are_those_of_the_wire_unless_given() -> None:
    infos = [NCCLTrainerInitInfo(), NCCLTrainerInitInfo(wire="vllm")]
    infos.append(NCCLTrainerInitInfo(wire="vllm", packed_buffer_size_bytes=7, packed_num_buffers=3))
    assert [(info.buffer_bytes, info.buffers) for info in infos] == [(16 << 20, 8), (1 << 30, 2), (7, 3)]


# Refusals, before any call


NARROW_FIRST = {"narrow": torch.ones(3, dtype=torch.bfloat16), "wide": torch.ones(3)}


@pytest.mark.parametrize(
    ("state", "limit", "words"),
    [
        (NARROW_FIRST, 100, "'wide' is float32 and would begin at byte 6 of its pack"),
        ({"bytes": torch.ones(3, dtype=torch.uint8), "half": torch.ones(4).half()}, 100, "'half' is float16"),
        # A tensor of no bytes is viewed too.
        (
            {"narrow": torch.ones(1, dtype=torch.int8), "none": torch.empty(0, dtype=torch.int64)},
            100,
            "'none' is int64",
        ),
        ({"a": torch.ones(30), "b": torch.ones(1).half(), "c": torch.ones(1)}, 100, "'c' is float32.* byte 2 "),
    ],
)
def test_packs_that_vllm_cannot_take_apart_are_refused(state: dict[str, Any], limit: int, words: str) -> None:
    client = StockWorker()
    with pytest.raises(MetadataError, match=f"{words}.*packed=False, or a source that yields wider dtypes first"):
        trainer(client, StateDictSource(state), world_size=2, packed_buffer_size_bytes=limit)
    assert client.calls == []


@pytest.mark.parametrize("way", ["packed", "unpacked", "cut"])
def test_what_the_refusal_says_to_do_helps(worker: Counting, way: str) -> None:
    state = dict(reversed(NARROW_FIRST.items())) if way == "packed" else NARROW_FIRST
    # Cut at five bytes each parameter has a pack of its own.
    size = 5 if way == "cut" else None
    sender = trainer(worker, StateDictSource(state), packed=way != "unpacked", packed_buffer_size_bytes=size)
    sender.send_weights()
    assert all(torch.equal(worker.weights[name], tensor) for name, tensor in state.items())
    sender.shutdown()


def test_dtypes_that_vllm_takes_packed_only() -> None:
    client = StockWorker()
    source = StateDictSource({"mask": torch.ones(2, dtype=torch.bool)})
    with pytest.raises(MetadataError, match="'mask' is bool, which vLLM takes packed only"):
        trainer(client, source, packed=False, world_size=2)
    assert client.calls == []


def test_the_number_of_workers_has_to_be_known_and_right(worker: Counting) -> None:
    with pytest.raises(MessageError, match="pass world_size"):
        trainer(StockWorker(), Mixed())
    with pytest.raises(MessageError, match="world_size 5 is not 1 senders plus the workers behind the client .1."):
        trainer(worker, Mixed(), world_size=5)
    assert worker.calls == []


def test_rank_zero_has_to_own_everything_and_checksums_are_refused() -> None:
    class Owned(StateDictSource):
        @property
        def _declared(self) -> Any:
            return [(ParamMeta("a", torch.float32, (2,), owners=(1,)), "")]

    with pytest.raises(MetadataError, match="'a' is owned by trainer ranks .1,. only.*trainer rank 0 has to own"):
        trainer(StockWorker(), Owned({"a": torch.ones(2)}), num_trainer_ranks=2)
    with pytest.raises(MessageError, match="compares no checksums"):
        trainer(StockWorker(), Mixed(), checksum=True)


def test_without_nccl4py_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl", None)
    monkeypatch.delitem(sys.modules, "nccl.core", raising=False)
    client = StockWorker()
    with pytest.raises(TransportUnavailable, match=r"pip install 'weightwire-nccl\[vllm\]'"):
        WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(wire="vllm", world_size=2), client=client, source=ModuleSource(Mixed())
        )
    assert client.calls == []


def test_a_source_that_is_there_is_looked_at_before_the_server_hears_of_it(worker: Counting) -> None:
    class Lying(WeightSource):
        @cached_property
        def metadata(self) -> Any:
            return [ParamMeta("a", torch.float32, (2,))]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.ones(3)

        def resident(self) -> Any:
            return ["a"], [torch.ones(3)]

    sender = trainer(worker, Lying())
    with pytest.raises(SourceMismatch, match="'a'"):
        sender.send_weights()
    assert worker.calls == ["init"]
    assert sender.linked
    sender.shutdown()
