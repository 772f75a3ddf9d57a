"""Our trainers on vLLM's wire, and vLLM's own classes at the other end of it: messages, packs, engines, clients.

There is no GPU here: gloo carries what NCCL would, and vLLM's streams have nothing to wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import clients, ipc_engine, nccl_engine, packed_tensor

from core.tests.test_stock_packing import Pair, metadata_of, models
from plugins.ipc.tests import stock_scene as ipc_scene
from plugins.ipc.tests.golden import UUID
from plugins.nccl.tests import stock_scene as nccl_scene
from weightwire.clients.protocol import VLLMWeightSyncClient
from weightwire.deadline import Deadline
from weightwire.errors import MetadataError
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource, StateDictSource
from weightwire.stock_packing import cut_packs, pack
from weightwire.worker import Worker
from weightwire_ipc.pickled import VARIABLE, decode_handles
from weightwire_nccl import NCCLTrainerInitInfo
from weightwire_nccl.stock import NCCL_DTYPES, check_alignment
from weightwire_server import BoundServer, create_app

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch's own, when vLLM imports inductor
]

DTYPES = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bytes under the same dtype and shape; a NaN is equal to itself here."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*flat)


# Packs


@pytest.mark.filterwarnings("ignore:Tensor 'p:UserWarning")  # vLLM's, of one that is larger than the buffer
@given(model=models(DTYPES), limit=st.integers(0, 300))
def test_vllm_packs_what_we_pack(model: list[Pair], limit: int) -> None:
    theirs, left = [], iter(model)
    while (chunk := packed_tensor.pack_tensors(left, lambda pair: pair[1], limit)) is not None:
        theirs.append(chunk.packed_tensor)
    packs = cut_packs([tensor.nbytes for _, tensor in model], limit)
    ours = [pack([model[place][1] for place in places]) for places in packs]
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


def vllm_unpacks(model: list[Pair], limit: int) -> bool:
    """Whether vLLM takes these packs apart; if so, it has to get what was packed."""
    for places in cut_packs([tensor.nbytes for _, tensor in model], limit):
        part = [model[place] for place in places]
        columns = zip(*((name, list(one.shape), one.dtype, one.nbytes) for name, one in part), strict=True)
        try:
            got = packed_tensor.unpack_tensor(pack([one for _, one in part]), *map(list, columns))
        except RuntimeError as error:
            if "storage_offset" in str(error):
                return False
            raise
        assert all(equal(one, other) for (_, one), (_, other) in zip(got, part, strict=True))
    return True


@given(model=models(DTYPES), limit=st.integers(0, 300))
def test_what_vllm_cannot_unpack_is_what_we_refuse(model: list[Pair], limit: int) -> None:
    try:
        check_alignment(metadata_of(model), limit)
    except MetadataError:
        assert not vllm_unpacks(model, limit)
    else:
        assert vllm_unpacks(model, limit)


@given(model=models(DTYPES), limit=st.integers(0, 300))
def test_wider_dtypes_first_is_always_taken(model: list[Pair], limit: int) -> None:
    model.sort(key=lambda pair: -pair[1].dtype.itemsize)
    check_alignment(metadata_of(model), limit)
    assert vllm_unpacks(model, limit)


def test_the_dtypes_that_vllm_broadcasts_unpacked() -> None:
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum

    every = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert {dtype for dtype in every if ncclDataTypeEnum.supports_torch_dtype(dtype)} == NCCL_DTYPES


# vLLM's engine, driven by our trainer


class Collecting(nn.Module):
    """A model that notes what it is given to load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[dict[str, torch.Tensor]] = []

    def load_weights(self, pairs: Any) -> None:
        self.loads.append({name: tensor.clone() for name, tensor in pairs})

    def loaded(self) -> dict[str, torch.Tensor]:
        return {name: tensor for load in self.loads for name, tensor in load.items()}


class Engine:
    """vLLM's NCCL engine as its worker drives it, layerwise reload left out: that needs a model of vLLM's."""

    def __init__(self) -> None:
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
        self.model = Collecting()
        self.engine = nccl_engine.NCCLWeightTransferEngine(
            WeightTransferConfig(backend="nccl"), config, torch.device("cpu"), self.model
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.model.loads.clear()

    def update_weights(self, update_info: Any) -> None:
        self.engine.receive_weights(self.engine.parse_update_info(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        return None


class Communicator:
    """What vLLM asks of its communicator, by gloo."""

    def __init__(self, group: nccl_scene.Group) -> None:
        self._group = group

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        self._group.broadcast(tensor, Deadline(30.0))

    def destroy(self) -> None:
        self._group.close()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The engine, and what it needs of a GPU."""

    def join(init_info: Any, parallel_config: Any) -> Communicator:
        rank = parallel_config.rank + init_info.rank_offset
        return Communicator(nccl_scene.join(init_info.nccl_unique_id_bytes, rank, init_info.world_size))

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", join)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    made = Engine()
    yield made
    made.engine.shutdown()


@pytest.mark.parametrize(
    ("info", "loads"),
    [
        ({}, [6]),
        ({"packed_buffer_size_bytes": 90, "packed_num_buffers": 3}, [2, 4]),
        ({"packed": False}, [1, 1, 1, 1, 1, 1]),
    ],
    ids=["one pack", "several packs", "unpacked"],
)
def test_vllms_nccl_engine_receives_what_our_trainer_sends(engine: Engine, info: Any, loads: list[int]) -> None:
    assert isinstance(engine, VLLMWeightSyncClient)
    model = nccl_scene.Mixed(1.0)
    sender = nccl_scene.trainer(engine, model, world_size=2, **info)
    for value in (1.0, 2.0):
        model.load_state_dict(nccl_scene.Mixed(value).state_dict())
        sender.send_weights(weight_version="step")
        assert [len(load) for load in engine.model.loads] == loads
        assert nccl_scene.same(engine.model.loaded(), model)
    assert engine.engine.packed_buffer_size_bytes == info.get("packed_buffer_size_bytes", 1 << 30)
    assert engine.engine.packed_num_buffers == info.get("packed_num_buffers", 2)
    sender.shutdown()


def test_vllms_error_comes_back_in_its_words(engine: Engine) -> None:
    sender = nccl_scene.trainer(engine, StateDictSource({"a": torch.ones(2)}), world_size=2)
    engine.engine.parse_update_info = lambda info: engine.engine.update_info_cls(**info, more=1)
    with pytest.raises(RuntimeError, match="unexpected keyword argument 'more'"):
        sender.send_weights()
    del engine.engine.parse_update_info
    assert sender.send_weights().reinitialised
    sender.shutdown()


# CUDA IPC messages


@pytest.mark.parametrize("packed", [True, False])
def test_vllm_parses_our_ipc_messages(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    client = ipc_scene.Recorder()
    ipc_scene.trainer(client, ipc_scene.Mixed(1.0), packed=packed).send_weights()
    init_info, update = client.messages
    assert ipc_engine.IPCWeightTransferInitInfo(**init_info).packed is packed
    plain = ipc_engine.IPCWeightTransferUpdateInfo(**update)
    assert plain.names == ["small", "wide", "hollow", "flags", "last"]
    assert plain.tensor_sizes == ([6, 80, 0, 3, 32] if packed else None)
    # Over HTTP vLLM's own client pickles the handles, as ours does; each side reads both.
    safe: Any = clients._json_safe_update_payload(update)
    assert safe.keys() == update.keys() - {"ipc_handles"} | {"ipc_handles_pickled"}
    assert decode_handles(safe["ipc_handles_pickled"]) == update["ipc_handles"]
    assert ipc_engine.IPCWeightTransferUpdateInfo(**safe).ipc_handles == update["ipc_handles"]


@pytest.mark.parametrize("packed", [True, False])
def test_vllm_unpickles_the_handles_that_we_pickle(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")

    class OverHTTP(ipc_scene.Recorder):
        base_url = "http://127.0.0.1"

    client = OverHTTP()
    ipc_scene.trainer(client, ipc_scene.Mixed(1.0), packed=packed).send_weights()
    update = client.messages[1]
    assert "ipc_handles" not in update
    handles = ipc_engine.IPCWeightTransferUpdateInfo(**update).ipc_handles
    first: Any = handles if isinstance(handles, dict) else (handles or [])[0]
    assert list(first) == [UUID]
    assert len(first[UUID]) == 15
    assert handles == decode_handles(update["ipc_handles_pickled"])


# vLLM's client


def test_vllms_client_drives_a_weightwire_server() -> None:
    theirs, mine = nn.Linear(4, 3), nn.Linear(4, 3)
    worker = Worker(theirs)
    with BoundServer(create_app(worker)) as server:
        client = clients.HTTPVLLMWeightSyncClient(server.url)
        assert isinstance(client, VLLMWeightSyncClient)
        sender = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(world_size=2, timeout=20.0), client=client, source=ModuleSource(mine)
        )
        for label in ("one", "two"):
            nn.init.normal_(mine.weight)
            report = sender.send_weights(weight_version=label)
            assert torch.equal(theirs.weight, mine.weight)
            assert worker.info()["weight_version"] == report.label == label
        sender.shutdown()
    worker.shutdown()
