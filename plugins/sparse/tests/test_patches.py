"""A caller's own patches: what the reference's users send, and everything that is refused before anybody is called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.tests.sharded_fleet import digests
from weightwire.clients.local import LocalClient
from weightwire.errors import HandshakeError, MessageError, TransferError, Unsupported, UpdateRefused
from weightwire.messages import WeightTransferConfig
from weightwire.registry import WeightTransferEngineFactory, WeightTransferTrainerFactory
from weightwire.source import ModuleSource, as_bytes
from weightwire.worker import Worker
from weightwire_sparse import (
    SparseNCCLTrainerInitInfo,
    SparseNCCLWeightTransferEngine,
    SparseNCCLWeightTransferUpdateInfo,
    SparseWeightPatch,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 5, dtype=torch.bfloat16), False)
        self.count = nn.Parameter(torch.zeros(9, dtype=torch.int64), False)
        self.turned = nn.Parameter(torch.zeros(4, 3).t(), False)


class Recording(LocalClient):
    """Notes what it is asked for."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.calls: list[Any] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any], **options: Any) -> None:
        self.calls.append(("init", init_info))
        super().init_weight_transfer_engine(init_info, **options)

    def start_weight_update(self, **options: Any) -> None:
        self.calls.append("start")
        super().start_weight_update(**options)

    def update_weights(self, update_info: Any, **options: Any) -> None:
        self.calls.append(("update", update_info))
        super().update_weights(update_info, **options)

    def finish_weight_update(self, *arguments: Any, **options: Any) -> None:
        self.calls.append("finish")
        super().finish_weight_update(*arguments, **options)


class Scene:
    def __init__(self) -> None:
        self.model = Model()
        self.client = Recording(Worker(self.model))
        self.engine: Any = WeightTransferTrainerFactory.trainer_init(SparseNCCLTrainerInitInfo(), client=self.client)
        (self.initialised,) = self.client.calls
        self.client.calls.clear()

    def close(self) -> None:
        self.engine.shutdown()
        self.client.worker.shutdown()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def patch(name: str, indices: Any, values: Any, shape: Any, dtype: torch.dtype = torch.bfloat16) -> SparseWeightPatch:
    return SparseWeightPatch(name, torch.tensor(indices, dtype=torch.int32), torch.tensor(values, dtype=dtype), shape)


WEIGHT = (6, 5)


def test_positions_land_and_all_else_stays(scene: Scene) -> None:
    nan = float("nan")
    report = scene.engine.send_weights(
        [
            patch("weight", [29, 0, 7], [1.0, nan, -0.0], WEIGHT),
            patch("turned", [1, 4], [2.0, 3.0], (3, 4), torch.float32),
        ],
        weight_version="patched",
    )
    flat = scene.model.weight.data.view(-1).clone()
    assert flat[0].isnan() and flat[29] == 1 and flat[7] == 0 and flat[7].signbit()
    flat[[0, 29, 7]] = 0
    assert not flat.any() and not scene.model.count.any()
    assert scene.model.turned[0, 1] == 2 and scene.model.turned[1, 0] == 3
    assert scene.client.worker.info()["weight_version"] == "patched"
    assert (report.scope, report.parameters, report.verified) == ("partial", 2, False)
    start, (_, update), finish = scene.client.calls
    assert (start, finish) == ("start", "finish")
    assert update["names"] == ["weight", "turned"]
    assert update["dtype_names"] == ["bfloat16", "float32"]
    assert update["shapes"] == [[6, 5], [3, 4]]
    assert update["num_updates_list"] == [3, 2]


def test_the_handshake_has_the_references_fields(scene: Scene) -> None:
    _, info = scene.initialised
    assert info["rank_offset"] == 1
    assert info["world_size"] == 2
    assert "packed" not in info, "the worker's default stays"


@pytest.mark.parametrize("patches", [None, []])
def test_nothing_to_send_calls_nobody(scene: Scene, patches: Any) -> None:
    report = scene.engine.send_weights(patches)
    scene.engine.send_weight_chunk(patches)
    assert scene.client.calls == []
    assert (report.parameters, report.bytes) == (0, 0)


def test_other_ranks_do_nothing_at_all(scene: Scene) -> None:
    other: Any = WeightTransferTrainerFactory.trainer_init(
        SparseNCCLTrainerInitInfo(rank=1, num_trainer_ranks=2), client=scene.client
    )
    assert other.send_weights([patch("weight", [0], [1.0], WEIGHT)]).parameters == 0
    other.send_weight_chunk([patch("weight", [0], [1.0], WEIGHT)])
    other.shutdown()
    assert scene.client.calls == []


BAD = {
    "no shape": (patch("weight", [0], [1.0], None), "has no full_shape"),
    "int64": (SparseWeightPatch("weight", torch.tensor([0]), torch.ones(1), WEIGHT), "give 1-D torch.int32"),
    "2-D": (patch("weight", [[0]], [[1.0]], WEIGHT), "give 1-D"),
    "lengths": (patch("weight", [0, 1], [1.0], WEIGHT), "has 2 indices for values of shape"),
    "beyond": (patch("weight", [3, 30], [1.0, 2.0], WEIGHT), "names position 30 of 30"),
    "negative": (patch("weight", [3, -1], [1.0, 2.0], WEIGHT), "names position -1 of 30"),
    "twice": (patch("weight", [3, 4, 3], [1.0, 2.0, 1.0], WEIGHT), "names position 3 twice"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_patch_that_cannot_be_is_refused_before_any_call(scene: Scene, bad: str) -> None:
    broken, words = BAD[bad]
    good = patch("turned", [1], [1.0], (3, 4), torch.float32)
    for send in (scene.engine.send_weights, scene.engine.send_weight_chunk):
        with pytest.raises(UpdateRefused, match=words) as refused:
            send([good, broken])
        assert refused.value.parameter == "weight"
    with pytest.raises(UpdateRefused, match="comes twice in one call"):
        scene.engine.send_weights([good, good])
    assert scene.client.calls == []
    assert not scene.model.turned.any()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (patch("nobody", [0], [1.0], WEIGHT), "nobody"),
        (patch("weight", [0], [1.0], (5, 6)), "weight"),
        (patch("weight", [0], [1.0], WEIGHT, torch.float32), "weight"),
    ],
    ids=["name", "shape", "dtype"],
)
def test_what_the_worker_refuses_changes_nothing_and_leaves_the_link(
    scene: Scene, wrong: SparseWeightPatch, words: str
) -> None:
    with pytest.raises(UpdateRefused, match=words):
        scene.engine.send_weights([patch("count", [1], [4], (9,), torch.int64), wrong])
    assert not any(parameter.any() for parameter in scene.model.parameters())
    assert not scene.engine.send_weights([patch("weight", [2], [5.0], WEIGHT)]).reinitialised
    assert scene.model.weight[0, 2] == 5


def test_views_are_sent_as_they_read(scene: Scene) -> None:
    indices = torch.tensor([0, 99, 2, 99, 4, 99], dtype=torch.int32)[::2]
    values = torch.tensor([[1.0, 9.0], [2.0, 9.0], [3.0, 9.0]], dtype=torch.bfloat16)[:, 0]
    assert not indices.is_contiguous() and not values.is_contiguous()
    scene.engine.send_weights([SparseWeightPatch("weight", indices, values, WEIGHT)])
    assert scene.model.weight.view(-1)[:5].tolist() == [1, 0, 2, 0, 3]


def test_several_chunks_within_one_update_of_the_callers(scene: Scene) -> None:
    scene.client.start_weight_update()
    scene.engine.send_weight_chunk([patch("weight", [0, 1], [1.0, 2.0], WEIGHT)])
    scene.engine.send_weight_chunk([patch("count", [3], [7], (9,), torch.int64)])
    assert not any(parameter.any() for parameter in scene.model.parameters())
    scene.client.finish_weight_update("mine")
    assert scene.model.weight.view(-1)[:3].tolist() == [1, 2, 0]
    assert scene.model.count[3] == 7
    assert scene.client.worker.info()["weight_version"] == "mine"


def test_patches_stand_on_what_the_engine_left(scene: Scene) -> None:
    scene.engine.send_weights([patch("weight", [0], [1.0], WEIGHT)])
    scene.client.start_weight_update()
    scene.engine.send_weight_chunk([patch("weight", [1], [2.0], WEIGHT)])
    scene.client.finish_weight_update()
    with pytest.raises(HandshakeError, match="send a full update"):
        scene.engine.send_weights([patch("weight", [2], [3.0], WEIGHT)])
    assert scene.model.weight.view(-1)[:3].tolist() == [1, 2, 0]


def test_an_engine_with_a_source_takes_no_patches() -> None:
    worker = Worker(Model())
    engine: Any = WeightTransferTrainerFactory.trainer_init(
        SparseNCCLTrainerInitInfo(), client=LocalClient(worker), source=ModuleSource(Model())
    )
    with pytest.raises(Unsupported, match="finds what changed by itself"):
        engine.send_weights([patch("weight", [0], [1.0], WEIGHT)])
    assert not hasattr(engine, "send_weight_chunk")
    engine.shutdown()
    worker.shutdown()


VALID: dict[str, Any] = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 3]], "num_updates_list": [4]}


def test_a_valid_update_is_accepted() -> None:
    (meta,) = SparseNCCLWeightTransferUpdateInfo(**VALID).patched or ()
    assert (meta.name, meta.dtype, meta.shape) == ("w", torch.float32, (2, 3))
    assert SparseNCCLWeightTransferUpdateInfo().patched is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype_names": []},
        {"shapes": [[1], [2]]},
        {"names": [], "dtype_names": [], "shapes": [], "num_updates_list": []},
        {"num_updates_list": [1, 2]},
        {"num_updates_list": [-1]},
        {"names": None},
    ],
    ids=str,
)
def test_an_invalid_update_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        SparseNCCLWeightTransferUpdateInfo(**{**VALID, **wrong})


def test_a_bare_engine_before_init() -> None:
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="sparse_nccl"), None, torch.device("cpu"), Model()
    )
    assert isinstance(engine, SparseNCCLWeightTransferEngine)
    assert not engine.supports_draft_weight_update
    with pytest.raises(TransferError, match="not initialized"):
        engine.receive_weights(SparseNCCLWeightTransferUpdateInfo(**VALID))
    with pytest.raises(ValueError, match="Invalid init_info"):
        engine.parse_init_info({"master_port": 1})
    with pytest.raises(Unsupported, match="stock vLLM"):
        engine.init_transfer_engine(
            engine.parse_init_info({"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2})
        )


def test_limits_are_checked() -> None:
    for wrong in ({"threads": 0}, {"dense_above": -0.1}, {"verify_every": -1}, {"stall_limit": 0}):
        with pytest.raises(MessageError):
            SparseNCCLTrainerInitInfo(**wrong)


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_random_patches_equal_plain_writing(data: st.DataObject) -> None:
    scene = Scene()
    plain = Model()
    try:
        for _ in range(3):
            patches = []
            for name, parameter in plain.named_parameters():
                places = data.draw(st.lists(st.integers(0, parameter.numel() - 1), unique=True))
                raw = data.draw(
                    st.binary(min_size=len(places) * parameter.itemsize, max_size=len(places) * parameter.itemsize)
                )
                values = torch.tensor(list(raw), dtype=torch.uint8).view(parameter.dtype)
                indices = torch.tensor(places, dtype=torch.int32)
                write(parameter.data, indices, values)
                patches.append(SparseWeightPatch(name, indices, values, tuple(parameter.shape)))
            scene.engine.send_weights(patches)
            assert digests(scene.model) == digests(plain)
    finally:
        scene.close()


def write(tensor: Tensor, indices: Tensor, values: Tensor) -> None:
    whole = tensor.contiguous()
    rows = as_bytes(whole).view(-1, whole.element_size())
    rows[indices.long()] = as_bytes(values).view(-1, whole.element_size())
    tensor.copy_(whole)


def test_a_chunk_after_an_update_that_was_refused(scene: Scene) -> None:
    with pytest.raises(UpdateRefused):
        scene.engine.send_weights([patch("nobody", [0], [1.0], WEIGHT)])
    scene.client.start_weight_update()
    scene.engine.send_weight_chunk([patch("weight", [1], [2.0], WEIGHT)])
    scene.client.finish_weight_update()
    assert scene.model.weight[0, 1] == 2
