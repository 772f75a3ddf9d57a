"""What users of vLLM's engines rely on, by name: messages, orders of calls, and the words of errors."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from weightwire.clients.local import LocalClient
from weightwire.clients.protocol import VLLMWeightSyncClient
from weightwire.errors import MessageError, SourceMismatch, TransferError, Unsupported
from weightwire.layout import ParamMeta
from weightwire.messages import WeightTransferConfig
from weightwire.registry import WeightTransferEngineFactory, WeightTransferTrainerFactory
from weightwire.source import ModuleSource, WeightSource
from weightwire.worker import Worker
from weightwire_nccl import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

UID = base64.b64encode(bytes(range(128))).decode()
CPU = torch.device("cpu")


def model(value: float = 0.0) -> nn.Linear:
    built = nn.Linear(4, 3)
    nn.init.constant_(built.weight, value)
    nn.init.constant_(built.bias, value)
    return built


def bare(target: Any) -> NCCLWeightTransferEngine:
    engine = WeightTransferEngineFactory.create_engine(WeightTransferConfig(backend="nccl"), None, CPU, target)
    assert isinstance(engine, NCCLWeightTransferEngine)
    return engine


class FourMethods:
    """A client of the reference: four methods and nothing else, around an engine that is driven bare."""

    def __init__(self, engine: NCCLWeightTransferEngine) -> None:
        self.engine = engine
        self.calls: list[str] = []
        self.init_info: dict[str, Any] = {}
        self.update_info: dict[str, Any] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        self.init_info = init_info
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self.engine.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")
        self.update_info = update_info
        self.engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")
        self.engine.finish_weight_update()


# Messages


def test_an_update_lists_names_dtypes_and_shapes_of_equal_length() -> None:
    good: dict[str, Any] = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
    assert NCCLWeightTransferUpdateInfo(**good).names == ["a"]
    assert NCCLWeightTransferUpdateInfo().names == []
    for key in ("dtype_names", "shapes"):
        with pytest.raises(MessageError, match=f"{key} has 0 elements for 1 names"):
            NCCLWeightTransferUpdateInfo(**{**good, key: []})


def test_a_worker_meets_by_address_or_by_unique_id() -> None:
    positional, by_position = ("h", 1, 1, 2), cast(Any, NCCLWeightTransferInitInfo)
    common: dict[str, Any] = {"rank_offset": 1, "world_size": 2}
    assert NCCLWeightTransferInitInfo(master_address="h", master_port=1, **common).packed is False
    by_id = NCCLWeightTransferInitInfo(nccl_unique_id_b64=UID, **common)
    assert UID not in repr(by_id)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"nccl_unique_id_b64": UID, "master_port": 1}, "not both"),
        ({}, "or nccl_unique_id_b64"),
        ({"master_address": "h"}, "or nccl_unique_id_b64"),
        ({"nccl_unique_id_b64": "?" * 8}, "standard base64"),
        ({"nccl_unique_id_b64": base64.b64encode(b"short").decode()}, "holds 5 bytes"),
        ({"nccl_unique_id_b64": base64.urlsafe_b64encode(b"\xff" * 128).decode()}, "standard base64"),
    ]
    for fields, words in wrong:
        with pytest.raises(MessageError, match=words):
            NCCLWeightTransferInitInfo(**common, **fields)
    with pytest.raises(TypeError):
        by_position(*positional)


def test_a_trainer_takes_its_fields_by_position() -> None:
    info = NCCLTrainerInitInfo("127.0.0.1", 5000, 3)
    assert (info.master_address, info.master_port, info.world_size, info.packed) == ("127.0.0.1", 5000, 3, True)
    assert info.backend == "nccl"


def test_an_engine_parses_and_names_what_is_wrong() -> None:
    engine = bare(model())
    parsed = engine.parse_init_info({"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2})
    assert isinstance(parsed, NCCLWeightTransferInitInfo)
    with pytest.raises(ValueError, match="Invalid init_info for NCCLWeightTransferEngine: missing key 'rank_offset'"):
        engine.parse_init_info({"master_address": "h", "master_port": 1, "world_size": 2})
    with pytest.raises(ValueError, match="Invalid update_info for NCCLWeightTransferEngine: unknown key 'packed'"):
        engine.parse_update_info({"packed": True})
    assert engine.parse_update_info({"names": [], "dtype_names": [], "shapes": []}).names == []


# A worker engine on its own


def test_receiving_before_init_says_so() -> None:
    engine = bare(model())
    with pytest.raises(RuntimeError, match="not initialized"):
        engine.receive_weights(NCCLWeightTransferUpdateInfo(names=["a"], dtype_names=["float32"], shapes=[[1]]))
    engine.start_weight_update()
    with pytest.raises(TransferError, match="not initialized"):
        engine.update_weights({})


def test_a_stock_trainer_is_refused_clearly() -> None:
    engine = bare(model())
    info = engine.parse_init_info({"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2})
    with pytest.raises(Unsupported, match="stock vLLM trainer"):
        engine.init_transfer_engine(info)


def test_an_engine_driven_bare_by_a_four_method_client() -> None:
    theirs, mine = model(0.0), model(1.0)
    engine = bare(theirs)
    client = FourMethods(engine)
    assert isinstance(client, VLLMWeightSyncClient)
    trainer = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(world_size=2), client=client, source=ModuleSource(mine)
    )
    for value in (1.0, 2.0):
        nn.init.constant_(mine.weight, value)
        trainer.send_weights()
        assert torch.equal(theirs.weight, mine.weight)
        assert torch.equal(theirs.bias, mine.bias)
    assert client.calls == ["init", *["start", "update", "finish"] * 2]
    trainer.shutdown()
    engine.shutdown()


# A trainer engine


def test_the_handshake_carries_every_wire_parameter() -> None:
    client = FourMethods(bare(model()))
    info = NCCLTrainerInitInfo(world_size=2, packed_buffer_size_bytes=4096, packed_num_buffers=3)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model(1.0)))
    sent = {key: value for key, value in client.init_info.items() if key != "weightwire"}
    assert sent == {
        "master_address": "127.0.0.1",
        "master_port": client.init_info["weightwire"]["port"],
        "rank_offset": 1,
        "world_size": 2,
        "packed": True,
        "packed_buffer_size_bytes": 4096,
        "packed_num_buffers": 3,
    }
    assert isinstance(trainer, NCCLTrainerWeightTransferEngine)
    assert trainer.is_sender
    trainer.shutdown()
    client.engine.shutdown()


class Reordered(WeightSource):
    """Declares two parameters and yields what it is told to."""

    def __init__(self, pairs: list[tuple[str, Tensor]]) -> None:
        self.pairs = pairs

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta("weight", torch.float32, (3, 4)), ParamMeta("bias", torch.float32, (3,))]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.pairs


WEIGHT, BIAS = torch.ones(3, 4), torch.ones(3)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([("bias", BIAS), ("weight", WEIGHT)], "index 0"),
        ([("weight", WEIGHT.double()), ("bias", BIAS)], "index 0"),
        ([("weight", WEIGHT)], "bias"),
        ([("weight", WEIGHT), ("bias", BIAS), ("more", BIAS)], "more"),
        ([("weight", WEIGHT), ("bias", torch.ones(4))], "index 1"),
    ],
    ids=["reordered", "dtype", "truncated", "extra", "shape"],
)
def test_a_source_is_held_to_its_metadata(pairs: list[tuple[str, Tensor]], words: str) -> None:
    theirs = model()
    worker = Worker(theirs)
    trainer = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(), client=LocalClient(worker), source=Reordered(pairs)
    )
    with pytest.raises(SourceMismatch, match=words):
        trainer.send_weights()
    assert not theirs.weight.any()
    trainer.shutdown()
    worker.shutdown()


def test_a_tensor_that_is_not_contiguous_is_made_so() -> None:
    theirs = model()
    worker = Worker(theirs)
    weight = torch.arange(12.0).reshape(4, 3).t()
    trainer = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(), client=LocalClient(worker), source=Reordered([("weight", weight), ("bias", BIAS)])
    )
    trainer.send_weights()
    assert torch.equal(theirs.weight, weight)
    trainer.shutdown()
    worker.shutdown()


def test_a_failed_call_ends_the_round_even_while_its_thread_is_blocked() -> None:
    go = threading.Event()

    class Blocked(LocalClient):
        def update_weights(self, *args: Any, **kwargs: Any) -> None:
            go.wait(20)

    worker = Worker(model())
    trainer = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(), client=Blocked(worker), source=ModuleSource(model(1.0))
    )
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="worker rank 0"):
        trainer.send_weights(timeout=0.5)
    assert time.monotonic() - began < 5.0
    go.set()
    trainer.shutdown()
    worker.shutdown()


def test_the_older_form_of_trainer_init() -> None:
    worker = Worker(model())
    trainer = WeightTransferTrainerFactory.trainer_init(
        "nccl",
        WeightTransferConfig(backend="nccl"),
        NCCLTrainerInitInfo(),
        client=LocalClient(worker),
        source=ModuleSource(model(1.0)),
    )
    trainer.send_weights()
    trainer.shutdown()
    worker.shutdown()
