"""A trainer on vLLM's CUDA IPC wire: what it sends, in which order, and what it refuses to send."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from torch import nn

from plugins.ipc.tests.golden import OTHER_UUID, UUID
from plugins.ipc.tests.stock_scene import (
    HostExporter,
    HostTrainer,
    Mixed,
    Recorder,
    engine,
    trainer,
)
from weightwire.clients.fanout import FanoutClient
from weightwire.clients.http import HTTPVLLMWeightSyncClient
from weightwire.errors import MessageError, MetadataError, SourceMismatch, TransferError, Unsupported
from weightwire.layout import ParamMeta
from weightwire.source import ModuleSource, StateDictSource
from weightwire.testing.fixtures import BorrowRanks
from weightwire_ipc.messages import IPCTrainerInitInfo, IPCWeightTransferUpdateInfo
from weightwire_ipc.pickled import VARIABLE, decode_handles
from weightwire_ipc.stock import StockIPCTrainer
from weightwire_ipc.stock_update import cut_chunks, speaks_json

# What a trainer sends


@pytest.mark.parametrize("packed", [True, False])
def test_the_server_is_told_packed_and_nothing_else(packed: bool) -> None:
    client = Recorder()
    trainer(client, Mixed(), packed=packed)
    assert client.messages == [{"packed": packed}]


def test_unpacked_is_one_update_with_a_handle_for_each_parameter() -> None:
    client, model = Recorder(), Mixed(1.0)
    sender = trainer(client, model)
    report = sender.send_weights(weight_version="step-1")
    assert client.calls == ["init", "start", "update", "finish step-1"]
    update = client.messages[1]
    assert list(update) == ["names", "dtype_names", "shapes", "ipc_handles"]
    assert update["names"] == ["small", "wide", "hollow", "flags", "last"]
    assert update["dtype_names"] == ["bfloat16", "float32", "float32", "int8", "float64"]
    assert update["shapes"] == [[3], [4, 5], [0, 4], [3], [2, 2]]
    assert [list(handle) for handle in update["ipc_handles"]] == [[UUID]] * 5
    first = update["ipc_handles"][0][UUID]
    assert first[:6] == (torch.Tensor, torch.Size((3,)), (1,), 0, torch.storage.TypedStorage, torch.bfloat16)
    assert sender.exporter.log == ["export"] * 5 + ["fence", "release"]
    assert (report.path, report.verified, report.label) == ("CUDA IPC (vLLM's wire)", False, "step-1")
    assert report.bytes == sum(parameter.nbytes for parameter in model.parameters())


def test_packed_is_one_update_for_each_fill_of_one_buffer() -> None:
    client = Recorder()
    sender = trainer(client, Mixed(1.0), packed=True, packed_buffer_size_bytes=86)
    sender.send_weights()
    assert client.calls == ["init", "start", "update", "update", "finish"]
    one, two = client.messages[1:]
    assert list(one) == ["names", "dtype_names", "shapes", "tensor_sizes", "ipc_handles"]
    assert (one["names"], one["tensor_sizes"]) == (["small", "wide", "hollow"], [6, 80, 0])
    assert (two["names"], two["tensor_sizes"]) == (["flags", "last"], [3, 32])
    assert one["ipc_handles"] == two["ipc_handles"]
    assert one["ipc_handles"][UUID][1] == torch.Size((86,))
    # One export for the round; memory is written before it is told of.
    assert sender.exporter.log == ["allocate", "export", "fence", "fence", "release"]


def test_a_fill_ends_before_what_would_overflow_it() -> None:
    def cut(*sizes: int, limit: int = 100) -> list[list[int]]:
        metas = [ParamMeta(f"p{place}", torch.uint8, (size,)) for place, size in enumerate(sizes)]
        return cut_chunks(metas, limit)

    assert cut() == []
    assert cut(0) == [[0]]
    assert cut(50, 50, 0) == [[0, 1, 2]]
    assert cut(50, 51) == [[0], [1]]
    assert cut(40, 60, 1, 100, 5) == [[0, 1], [2], [3], [4]]


def test_a_parameter_larger_than_the_buffer_is_refused_before_anything_is_sent() -> None:
    client = Recorder()
    with pytest.raises(ValueError, match="'wide' has 80 bytes and the packed buffer 79.*packed_buffer_size_bytes=80"):
        trainer(client, Mixed(), packed=True, packed_buffer_size_bytes=79)
    assert client.calls == []


def test_what_is_not_contiguous_is_made_so() -> None:
    source = StateDictSource({"weight": torch.arange(12.0).reshape(4, 3).t()})
    theirs = nn.Linear(4, 3, bias=False)
    trainer(Recorder(engine(theirs)), source).send_weights()
    assert torch.equal(theirs.weight, torch.arange(12.0).reshape(4, 3).t())


def test_a_source_is_needed_and_held_to_its_metadata() -> None:
    with pytest.raises(MetadataError, match="needs a source"):
        HostTrainer.trainer_init(IPCTrainerInitInfo(wire="vllm"), client=Recorder())
    for packed in (True, False):
        state = {"a": torch.ones(2), "b": torch.ones(2)}
        client = Recorder()
        sender = trainer(client, StateDictSource(lambda state=state: state), packed=packed)  # type: ignore[misc]
        assert sender.metadata
        state["c"] = state.pop("b")
        with pytest.raises(SourceMismatch, match="'c'"):
            sender.send_weights()
        assert "finish" not in client.calls


def test_a_trainer_that_does_not_own_everything_is_refused() -> None:
    class Owned(StateDictSource):
        @property
        def _declared(self) -> Any:
            return [(ParamMeta("a", torch.float32, (2,), owners=(0,)), "")]

    source = Owned({"a": torch.ones(2)})
    with pytest.raises(MetadataError, match="'a' is owned by trainer ranks .0,. only"):
        trainer(Recorder(), source, num_trainer_ranks=2)


def test_several_ranks_need_the_default_process_group() -> None:
    with pytest.raises(MessageError, match="default process group to be exactly these ranks; it has 0"):
        trainer(Recorder(), Mixed(), num_trainer_ranks=2)


def test_weights_off_the_gpu_are_refused_with_what_to_do() -> None:
    client = Recorder()
    sender = StockIPCTrainer.trainer_init(
        IPCTrainerInitInfo(wire="vllm"), client=client, source=ModuleSource(Mixed(1.0))
    )
    with pytest.raises(Unsupported, match="this tensor is on cpu.*memory='host'"):
        sender.send_weights()
    assert client.calls == ["init", "start"]


def test_patches_and_a_closed_trainer_are_refused() -> None:
    sender = trainer(Recorder(), Mixed())
    with pytest.raises(Unsupported, match="not patches"):
        sender.send_weights([])
    sender.shutdown()
    sender.shutdown()
    with pytest.raises(TransferError, match="after shutdown"):
        sender.send_weights()


@pytest.mark.parametrize("step", ["start", "update", "finish"])
def test_after_a_failure_the_server_is_initialised_again(step: str) -> None:
    client = Recorder(fail=step)
    sender = trainer(client, Mixed(1.0))
    with pytest.raises(RuntimeError, match=f"{step} failed with 404 .a vLLM server needs VLLM_SERVER_DEV_MODE=1"):
        sender.send_weights()
    assert sender.exporter.log[-1] == "release"
    client.fail, client.calls = None, []
    assert sender.send_weights().reinitialised
    # vLLM refuses to start where it has started, so what it may have open is ended first.
    assert client.calls == ["finish", "init", "start", "update", "finish"]
    assert not sender.send_weights().reinitialised


# Over HTTP


class Server:
    """Notes every request that comes over HTTP; answers as a stock server."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.status = 200
        noted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                noted.requests.append((self.path, json.loads(body) if body else None))
                answer = b'{"detail": "Not Found"}' if noted.status == 404 else b"{}"
                self.send_response(noted.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.mark.parametrize("packed", [True, False])
def test_over_http_handles_are_pickled(server: Server, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    client = HTTPVLLMWeightSyncClient(server.url)
    trainer(client, Mixed(1.0), packed=packed).send_weights(weight_version="step-1")
    client.close()
    paths = [path for path, _ in server.requests]
    assert paths == [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    ]
    assert server.requests[0][1] == {"init_info": {"packed": packed}}
    assert server.requests[3][1] == {"weight_version": "step-1"}
    update = server.requests[2][1]["update_info"]
    assert "ipc_handles" not in update
    monkeypatch.setenv(VARIABLE, "1")
    handles = decode_handles(update["ipc_handles_pickled"])
    assert list(handles if isinstance(handles, dict) else handles[0]) == [UUID]
    assert IPCWeightTransferUpdateInfo.parse(update, what="update_info").ipc_handles == handles


def test_a_server_without_these_routes_says_what_it_needs(server: Server) -> None:
    server.status = 404
    client = HTTPVLLMWeightSyncClient(server.url)
    with pytest.raises(TransferError, match=f"404.*VLLM_SERVER_DEV_MODE=1.*{VARIABLE}=1"):
        trainer(client, Mixed())
    client.close()


def test_which_clients_speak_json() -> None:
    over_http = HTTPVLLMWeightSyncClient("http://127.0.0.1:1")
    assert speaks_json(over_http)
    assert speaks_json(FanoutClient([over_http]))
    assert not speaks_json(Recorder())
    over_http.close()


# Several trainer ranks


def rank_trainer(state: dict[str, Any], rank: int, folder: str, *, fail: bool = False, packed: bool = False) -> Any:
    """One of two trainer ranks over gloo, each on a GPU of its own name; returns what rank 0's client heard."""
    from torch import distributed

    class Ranked(HostTrainer):
        def make_exporter(self) -> HostExporter:
            self.exporter = HostExporter([UUID, OTHER_UUID][rank])
            return self.exporter

    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    try:
        client = Recorder()
        weights = {"a": torch.full((3,), 1.0), "b": torch.full((2,), 2.0)}
        info = IPCTrainerInitInfo(wire="vllm", rank=rank, packed=packed, packed_buffer_size_bytes=12, timeout=20.0)
        sender = Ranked.trainer_init(info, client=client, source=StateDictSource(lambda: weights))
        if fail:
            del weights["b"]
        try:
            sender.send_weights()
        except Exception as error:  # noqa: BLE001 - told to the test
            return client.calls, client.messages, f"{type(error).__name__}: {error}"
        return client.calls, client.messages, None
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("packed", [True, False])
def test_rank_zero_sends_the_handles_of_every_rank(ranks: BorrowRanks, tmp_path: Any, packed: bool) -> None:
    pending = [one.start(rank_trainer, place, str(tmp_path), packed=packed) for place, one in enumerate(ranks(2))]
    (calls, messages, none), (no_calls, _, neither) = [one.result() for one in pending]
    assert (none, neither, no_calls) == (None, None, [])
    updates = messages[1:]
    assert calls == ["init", "start", *["update"] * len(updates), "finish"]
    assert len(updates) == (2 if packed else 1)
    for update in updates:
        handles = [update["ipc_handles"]] if packed else update["ipc_handles"]
        assert [sorted(handle) for handle in handles] == [sorted((UUID, OTHER_UUID))] * len(handles)


def test_every_rank_hears_why_one_failed(ranks: BorrowRanks, tmp_path: Any) -> None:
    pending = [one.start(rank_trainer, place, str(tmp_path), fail=place == 1) for place, one in enumerate(ranks(2))]
    (calls, _, here), (_, _, there) = [one.result() for one in pending]
    assert calls == ["init", "start"]
    for told in (here, there):
        assert told.startswith("SourceMismatch")
        assert "'b'" in told
