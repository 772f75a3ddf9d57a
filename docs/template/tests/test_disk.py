"""What is this transport's own, beyond what the conformance kit asks of all: what lies on the disk, and when."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from weightwire_disk import DiskTrainerInitInfo, DiskTrainerWeightTransferEngine, DiskWeightTransferInitInfo
from weightwire_disk.directory import LinkFolder, published
from weightwire_disk.update import MANIFEST

from weightwire import LocalClient, ModuleSource, StateDictSource, WeightTransferTrainerFactory, Worker
from weightwire.errors import MessageError, PeerFailed, SourceMismatch, TransferError
from weightwire.source import as_bytes


class Pair:
    """A trainer and a worker of this process, over a directory."""

    def __init__(self, root: Path, trained: nn.Linear, served: nn.Linear, **info: Any) -> None:
        self.root, self.trained, self.served = root, trained, served
        self.worker = Worker(served)
        self.trainer: DiskTrainerWeightTransferEngine = WeightTransferTrainerFactory.trainer_init(
            DiskTrainerInitInfo(str(root), timeout=20.0, **info),
            client=LocalClient(self.worker),
            source=ModuleSource(trained),
        )  # type: ignore[assignment]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path / "updates", nn.Linear(6, 5), nn.Linear(6, 5), shard_bytes=64)
    yield made
    made.trainer.shutdown()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(mine, other.get_parameter(name)) for name, mine in one.named_parameters())


def test_an_update_is_ordinary_safetensors_with_a_manifest(pair: Pair) -> None:
    report = pair.trainer.send_weights()
    (update,) = published(pair.root)
    manifest = json.loads((update / MANIFEST).read_text())
    assert manifest["revision"] == report.revision
    stored = {name: one for file in update.glob("*.safetensors") for name, one in load_file(file).items()}
    for name, parameter in pair.trained.named_parameters():
        assert torch.equal(stored[name], parameter)
        record = manifest["parameters"][name]
        assert record["sha256"] == hashlib.sha256(as_bytes(parameter.detach()).numpy().data).hexdigest()
        assert (record["dtype"], tuple(record["shape"])) == ("float32", parameter.shape)
    assert len({record["file"] for record in manifest["parameters"].values()}) == 2
    assert f"safetensors in {pair.root}" in report.path
    assert equal(pair.served, pair.trained)


def test_updates_are_numbered_and_pruned(pair: Pair) -> None:
    for _ in range(4):
        pair.trainer.send_weights()
    assert [update.name for update in published(pair.root)] == ["update-00000003", "update-00000004"]


def test_another_trainer_numbers_on_and_nothing_else_is_left(pair: Pair) -> None:
    pair.trainer.send_weights()
    pair.trainer.shutdown()
    second = Pair(pair.root, nn.Linear(6, 5), nn.Linear(6, 5), keep=1)
    second.trainer.send_weights()
    second.trainer.shutdown()
    assert [path.name for path in pair.root.iterdir()] == ["update-00000002"]


def test_a_dead_trainers_folder_is_swept_and_a_living_ones_is_not(tmp_path: Path) -> None:
    abandoned = tmp_path / ".link-of-a-process-that-was-killed"
    abandoned.mkdir()
    living = LinkFolder(tmp_path)
    assert not abandoned.exists()
    LinkFolder(tmp_path).close()
    assert living.path.exists()
    living.close()
    living.close()
    assert list(tmp_path.iterdir()) == []


def test_a_version_that_another_trainer_took_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = LinkFolder(tmp_path)
    taken = tmp_path / "update-00000001"
    taken.mkdir()
    (taken / MANIFEST).touch()
    finished = link.path / "round-0"
    finished.mkdir()
    looks = iter([[], [taken]])
    monkeypatch.setattr("weightwire_disk.directory.published", lambda root: next(looks))
    assert link.publish(finished).name == "update-00000002"
    link.close()


def test_a_source_that_fails_publishes_nothing(pair: Pair) -> None:
    pair.trainer.send_weights()
    pair.trainer.source = StateDictSource({"weight": torch.zeros(6, 5), "bias": torch.zeros(5)})
    before = pair.served.weight.detach().clone()
    with pytest.raises(SourceMismatch, match="weight"):
        pair.trainer.send_weights()
    assert [update.name for update in published(pair.root)] == ["update-00000001"]
    assert torch.equal(pair.served.weight, before)
    pair.trainer.source = ModuleSource(pair.trained)
    assert pair.trainer.send_weights().reinitialised
    assert equal(pair.served, pair.trained)


@pytest.mark.parametrize("harm", ["bytes", "file", "manifest"])
def test_what_changed_on_the_disk_is_named_on_both_sides(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    publish = LinkFolder.publish

    def harmed(self: LinkFolder, folder: Path) -> Path:
        update = publish(self, folder)
        file = update / (MANIFEST if harm == "manifest" else "0-00000.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.unlink()
        if harm != "file":
            file.write_bytes(content)
        return update

    monkeypatch.setattr(LinkFolder, "publish", harmed)
    before = pair.served.weight.detach().clone()
    with pytest.raises((TransferError, PeerFailed)) as raised:
        pair.trainer.send_weights()
    words = {"bytes": "the bytes of 'weight' in", "file": "cannot read", "manifest": "is not the one"}[harm]
    assert words in str(raised.value)
    assert "worker rank 0" in str(raised.value)
    assert torch.equal(pair.served.weight, before)
    monkeypatch.undo()
    pair.trainer.send_weights()
    assert equal(pair.served, pair.trained)


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TransferError, match="cannot use .*file.* all ranks reach the same directory"):
        Pair(tmp_path / "file", nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_directory_that_the_worker_does_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        DiskTrainerWeightTransferEngine, "worker_init_info", lambda self: {"root": str(tmp_path / "elsewhere")}
    )
    with pytest.raises(TransferError, match="elsewhere is not the directory that trainer rank 0 uses"):
        Pair(tmp_path / "updates", nn.Linear(2, 2), nn.Linear(2, 2))


def test_messages_are_checked() -> None:
    with pytest.raises(MessageError, match="absolute path"):
        DiskWeightTransferInitInfo(root="updates")
    for info in ({"root": ""}, {"root": "x", "keep": 0}, {"root": "x", "shard_bytes": 0}):
        with pytest.raises(MessageError, match="keep and shard_bytes"):
            DiskTrainerInitInfo(**info)
