"""What both sides are initialised with, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from core.tests.sharded_fleet import BoxSource, Named, digests, loaded
from weightwire.clients.local import LocalClient
from weightwire.collective import TorchCommunicator
from weightwire.errors import MessageError, MetadataError, TransferError, Unsupported
from weightwire.layout import ParamMeta
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.worker import Worker
from weightwire_m2n import M2NTrainerInitInfo
from weightwire_m2n.layout_files import read_source_layout, read_worker_layouts


def bf16(name: str, *shape: int, owners: tuple[int, ...] | None = None) -> ParamMeta:
    return ParamMeta(name, torch.bfloat16, shape, owners=owners)


def trainer_of(client: Any, metadata: list[ParamMeta], **options: Any) -> Any:
    return WeightTransferTrainerFactory.trainer_init(
        M2NTrainerInitInfo(**options), client=client, source=BoxSource(metadata, 0)
    )


def in_process(metadata: list[ParamMeta], **options: Any) -> tuple[Named, LocalClient]:
    model = Named(metadata, [meta.name for meta in metadata])
    return model, LocalClient(Worker(model, **options))


def test_in_one_process(tmp_path: Path) -> None:
    metadata = [bf16("a", 6, 3), bf16("b", 4)]
    model, client = in_process(metadata)
    engine = trainer_of(client, metadata, layouts=str(tmp_path / "layouts"))
    engine.send_weights()
    assert digests(model) == loaded(metadata, ["a", "b"], 1)
    source, trainers = read_source_layout(tmp_path / "layouts" / "source.json")
    assert (list(source), trainers) == (metadata, 1)
    (plan,) = read_worker_layouts(tmp_path / "layouts" / "workers.json")
    assert [copied.source for copied in plan.copies] == ["a", "b"]
    assert json.loads((tmp_path / "layouts" / "workers.json").read_text())["plan_of"] == [0]
    assert sorted(path.name for path in (tmp_path / "layouts").iterdir()) == ["source.json", "workers.json"]
    engine.shutdown()


def test_a_stock_trainer_is_refused() -> None:
    _, client = in_process([bf16("a", 2)], backend="nccl_m2n")
    stock = {"master_address": "127.0.0.1", "master_port": 1234, "rank_offset": 1, "world_size": 2}
    with pytest.raises(Unsupported, match="no key 'weightwire'.*stock vLLM trainer"):
        client.init_weight_transfer_engine(stock)


def test_a_draft_model_is_refused() -> None:
    metadata = [bf16("a", 2)]
    model = Named(metadata, ["a"])
    client = LocalClient(Worker(model, draft_model=Named(metadata, ["a"])))
    engine = trainer_of(client, metadata, draft=True)
    with pytest.raises(Unsupported, match="'nccl_m2n' cannot update a draft model"):
        engine.send_weights()
    engine.shutdown()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"buffer_bytes": 63}, "buffer_bytes must be at least 64, got 63"),
        ({"num_buffers": 0}, "num_buffers must be positive"),
        ({"direct_bytes": 0}, "direct_bytes must be positive"),
        ({"stall_limit": 0}, "stall_limit must be positive"),
        ({"foreign": "a"}, "foreign"),
        ({"buffer_bytes": "8"}, "buffer_bytes"),
        ({"world_size": 5}, "world_size 5 is not 1 senders plus"),
    ],
)
def test_numbers_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    metadata = [bf16("a", 2)]
    _, client = in_process(metadata)
    with pytest.raises(MessageError, match=words):
        trainer_of(client, metadata, **options)


def test_an_owner_that_is_no_trainer_rank() -> None:
    metadata = [bf16("a", 2, owners=(0, 3))]
    _, client = in_process(metadata)
    with pytest.raises(MetadataError, match="'a' is owned by trainer rank 3, and there are 1 trainer"):
        trainer_of(client, metadata)


def test_patches_are_not_sent() -> None:
    metadata = [bf16("a", 2)]
    _, client = in_process(metadata)
    engine = trainer_of(client, metadata)
    with pytest.raises(Unsupported, match="whole weights, not patches"):
        engine.send_weights([])
    engine.shutdown()


def test_a_bit_that_changed_on_the_way_is_found() -> None:
    metadata = [bf16("a", 60), bf16("b", 60), bf16("c", 60)]
    model, client = in_process(metadata)
    engine = trainer_of(client, metadata, checksum=True, buffer_bytes=128, direct_bytes=100)
    before = digests(model)
    honest = TorchCommunicator.send
    sent = 0

    def corrupting(self: TorchCommunicator, buffers: list[torch.Tensor], *args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += 1
        if sent == 2:
            buffers = [buffer.clone() for buffer in buffers]
            buffers[0][7] ^= 1
        return honest(self, buffers, *args, **options)

    with (
        mock.patch.object(TorchCommunicator, "send", corrupting),
        pytest.raises(TransferError, match="the bytes of b changed on the way"),
    ):
        engine.send_weights()
    assert digests(model) == before
    assert engine.send_weights().verified
    assert digests(model) == loaded(metadata, ["a", "b", "c"], 1)
    engine.shutdown()
