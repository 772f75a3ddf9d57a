"""A worker on vLLM's CUDA IPC wire: what it takes, bit by bit, and what it refuses before anything is opened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from plugins.ipc.tests.golden import OTHER_UUID, UUID, arguments
from plugins.ipc.tests.stock_scene import (
    CPU,
    HostExporter,
    HostReception,
    Loading,
    Mixed,
    Recorder,
    StockEngine,
    Tied,
    engine,
    equal,
    message,
    packed_update,
    trainer,
)
from weightwire.clients.local import LocalClient
from weightwire.errors import MessageError, SourceMismatch, TransferError, Unsupported, UpdateRefused
from weightwire.layout import ParamMeta
from weightwire.registry import WeightTransferEngineFactory
from weightwire.sink import as_sink
from weightwire.source import ModuleSource, StateDictSource
from weightwire.worker import Worker
from weightwire_ipc.stock_reception import StockReception, own_handles, refuse_without_gpu, stock_metadata

# What a worker takes


@pytest.mark.parametrize("kind", [Mixed, Tied])
@pytest.mark.parametrize("packed", [True, False])
def test_a_stock_round_arrives_bit_by_bit(packed: bool, kind: type[Mixed]) -> None:
    theirs = kind(0.0)
    client = Recorder(engine(theirs))
    mine = kind(1.0)
    source = ModuleSource(mine, buffers=kind is Tied)
    sender = trainer(client, source, packed=packed, packed_buffer_size_bytes=86)
    for value in (1.0, 2.0):
        with torch.no_grad():
            for tensor in mine.state_dict().values():
                tensor.fill_(value)
        sender.send_weights()
        assert equal(theirs, mine)


@pytest.mark.parametrize("packed", [True, False])
def test_a_model_that_loads_by_itself(packed: bool) -> None:
    theirs = Loading()
    source = StateDictSource({"first": torch.full((3,), 1.0), "second": torch.full((3,), 2.0)})
    trainer(Recorder(engine(theirs)), source, packed=packed, packed_buffer_size_bytes=12).send_weights()
    assert theirs.fused.tolist() == [1.0] * 3 + [2.0] * 3


def test_a_packed_buffer_is_imported_once_in_a_round_and_let_go_at_its_end() -> None:
    worker = engine(Mixed())
    sender = trainer(Recorder(worker), Mixed(1.0), packed=True, packed_buffer_size_bytes=86)
    for number in (1, 2):
        sender.send_weights()
        assert worker.reception.imports == number
        assert worker.reception._imported is None


def test_another_export_replaces_the_one_that_is_held() -> None:
    reception, exporter = HostReception(CPU), HostExporter()
    sink = as_sink(model := nn.Linear(2, 1))
    for number, (name, parameter) in enumerate(model.named_parameters(), 1):
        buffer = torch.full((parameter.numel(),), float(number)).view(torch.uint8)
        info = packed_update([(name, parameter)], dict([exporter.export(buffer)]))
        if number == 1:
            sink.begin(reception.spec(sink, info))
        reception.receive(sink, info)
        assert reception.imports == number
    reception.finish(sink)
    sink.prepare()
    sink.commit()
    assert model.weight.tolist() == [[1.0, 1.0]]
    assert model.bias.tolist() == [2.0]


@pytest.mark.parametrize("packed", [True, False])
def test_a_round_that_lacks_a_parameter_changes_nothing(packed: bool) -> None:
    theirs = Mixed(0.0)
    state = dict(Mixed(1.0).named_parameters())
    del state["last"]
    with pytest.raises(UpdateRefused, match="'last'"):
        trainer(Recorder(engine(theirs)), StateDictSource(state), packed=packed).send_weights()
    assert equal(theirs, Mixed(0.0))


def test_an_update_that_never_finished_is_forgotten() -> None:
    theirs = Tied(0.0)
    worker = engine(theirs)
    source = ModuleSource(Tied(1.0), buffers=True)
    failing = Recorder(worker, fail="finish")
    sender = trainer(failing, source, packed=True)
    with pytest.raises(TransferError):
        sender.send_weights()
    assert worker.reception._kept
    worker.sink.abort()
    failing.fail = None
    sender.send_weights()
    assert equal(theirs, Tied(1.0))
    assert not worker.reception._kept


def test_the_handle_is_looked_up_before_anything_is_rebuilt() -> None:
    reception = HostReception(CPU)
    info = message(
        names=["a", "b"],
        dtype_names=["float32"] * 2,
        shapes=[[2, 3]] * 2,
        ipc_handles=[{UUID: arguments()}, {OTHER_UUID: arguments()}],
    )
    with pytest.raises(ValueError, match=f"IPC handle not found for GPU UUID {UUID} in ipc_handles.1.*{OTHER_UUID}"):
        reception.receive(as_sink(nn.Linear(1, 1)), info)
    assert reception.imports == 0


def test_a_handle_of_another_shape_or_dtype_is_refused() -> None:
    reception = HostReception(CPU)
    for dtype, shape in (("float32", [3, 2]), ("int32", [2, 3])):
        info = message(dtype_names=[dtype], shapes=[shape])
        with pytest.raises(MessageError, match="'a' is named as .* and its handle is of torch.float32"):
            reception.receive(as_sink(nn.Linear(1, 1)), info)
    assert reception.imports == 0


def test_a_packed_message_that_does_not_fit_is_refused() -> None:
    reception, weight = HostReception(CPU), ("weight", torch.empty(2, 3))
    flat = {"ipc_handles": {UUID: arguments((24,), torch.uint8)}}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tensor_sizes": None}, "needs tensor_sizes"),
        ({"tensor_sizes": [23]}, "'weight' has 24 bytes by its shape and dtype, and 23 in tensor_sizes"),
        ({"tensor_sizes": [-24]}, "-24 in tensor_sizes"),
        ({"ipc_handles": {UUID: arguments((23,), torch.uint8)}}, "24 bytes in all.*shape .23,."),
        ({"ipc_handles": {UUID: arguments((24,), torch.int8)}}, "of torch.int8"),
        ({"ipc_handles": {UUID: arguments((4, 6), torch.uint8)}}, "flat bytes"),
    ]
    for fields, words in wrong:
        with pytest.raises(ValueError, match=words):
            reception.receive(as_sink(nn.Linear(3, 2, bias=False)), packed_update([weight], {}, **(flat | fields)))
    assert reception.imports == 0


def test_a_hostile_handle_is_refused_before_anything_is_rebuilt() -> None:
    reception = HostReception(CPU)
    past_the_end = list(arguments())
    past_the_end[3] = 6
    info = message(
        names=["a", "b"],
        dtype_names=["float32"] * 2,
        shapes=[[2, 3]] * 2,
        ipc_handles=[{UUID: arguments()}, {UUID: tuple(past_the_end)}],
    )
    with pytest.raises(MessageError, match="ipc_handles.1.: a tensor of 48 bytes does not lie in a storage of 24"):
        reception.receive(as_sink(nn.Linear(1, 1)), info)
    assert reception.imports == 0


def test_a_worker_without_a_gpu_says_so() -> None:
    with pytest.raises(Unsupported, match="stock vLLM trainer's.*model is on cpu"):
        refuse_without_gpu(CPU)
    info = message(names=[], dtype_names=[], shapes=[], ipc_handles=[])
    with pytest.raises(Unsupported, match="model is on cpu"):
        StockReception(CPU).receive(as_sink(nn.Linear(1, 1)), info)


def test_metadata_of_a_message() -> None:
    assert stock_metadata(message(dtype_names=["bfloat16"])) == (ParamMeta("a", torch.bfloat16, (2, 3)),)
    for key, value in {"dtype_names": ["float99"], "shapes": [[-1]], "names": [""]}.items():
        with pytest.raises(ValueError):
            stock_metadata(message(**{key: value}))


def test_handles_of_other_gpus_are_checked_too() -> None:
    assert own_handles([{UUID: arguments(), OTHER_UUID: arguments()}], UUID)[0].storage is not None
    with pytest.raises(MessageError, match="ipc_handles.0."):
        own_handles([{UUID: arguments(), OTHER_UUID: ()}], UUID)


# Driven by a Worker


@pytest.fixture(scope="module")
def backend() -> str:
    """The backend under which a Worker finds the engine of these tests."""
    WeightTransferEngineFactory.register_engine("stock_scene", StockEngine)
    return "stock_scene"


@pytest.mark.parametrize("kind", [Mixed, Tied])
@pytest.mark.parametrize("packed", [True, False])
def test_a_worker_takes_all_of_a_round_or_nothing(backend: str, packed: bool, kind: type[Mixed]) -> None:
    theirs, mine = kind(0.0), kind(1.0)
    worker = Worker(theirs, backend=backend)
    state = dict(mine.state_dict())
    sender = trainer(LocalClient(worker), StateDictSource(lambda: state), packed=packed, packed_buffer_size_bytes=86)
    report = sender.send_weights(weight_version="step-1")
    assert (worker.weight_version, report.reinitialised) == ("step-1", False)
    assert equal(theirs, mine)
    revision = worker.info()["revision"]
    # The narrow ones are there already when the trainer finds that this one is not what it declared.
    last, state["last"] = state["last"], torch.ones(1)
    with pytest.raises(SourceMismatch, match="'last'"):
        sender.send_weights()
    assert (worker.state, worker.info()["revision"]) == ("ready", revision)
    assert equal(theirs, mine)
    state["last"] = last.fill_(3.0)
    assert sender.send_weights().reinitialised
    assert equal(theirs, mine)
    worker.shutdown()
