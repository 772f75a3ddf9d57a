"""Which way a parameter goes follows from where it lies, one by one; and no way changes a byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from plugins.ipc.tests.fleet import digests
from weightwire.clients.local import LocalClient
from weightwire.source import ModuleSource
from weightwire.worker import Worker
from weightwire_ipc import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine, share


def mixed(seed: int) -> nn.Module:
    """Plain, transposed, and large enough transposed to be cut across slots."""
    torch.manual_seed(seed)
    model = nn.Module()
    model.plain = nn.Parameter(torch.randn(300, 200))
    model.turned = nn.Parameter(torch.randn(40, 30).t())
    model.wide = nn.Parameter(torch.randn(500, 700).t())
    model.empty = nn.Parameter(torch.empty(0, 3))
    return model


def engine(source: nn.Module, target: nn.Module, **info: Any) -> tuple[IPCTrainerWeightTransferEngine, Worker]:
    worker = Worker(target)
    init = IPCTrainerInitInfo(packed_buffer_size_bytes=1 << 16, **info)
    made = IPCTrainerWeightTransferEngine.trainer_init(init, client=LocalClient(worker), source=ModuleSource(source))
    return made, worker


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("adopt", [False, True])
def test_what_is_not_contiguous_goes_its_own_way(shared: bool, adopt: bool, checksum: bool) -> None:
    mine, theirs = mixed(1), mixed(2)
    if shared:
        share(mine)
    trainer, worker = engine(mine, theirs, adopt=adopt, checksum=checksum)
    for _ in range(3):
        with torch.no_grad():
            for parameter in mine.parameters():
                parameter.add_(1)
        report = trainer.send_weights()
        assert digests(theirs) == digests(mine)
    if not adopt:
        direct = 1 if shared else 0
        assert f"{direct} parameters read in place, {4 - direct} through a ring" in report.path
    trainer.shutdown()
    worker.shutdown()


def test_a_parameter_that_moves_out_of_shared_memory_is_sent_from_where_it_is() -> None:
    mine, theirs = mixed(1), mixed(2)
    share(mine)
    trainer, worker = engine(mine, theirs)
    assert "1 parameters read in place" in trainer.send_weights().path
    mine.plain.data = torch.randn(300, 200)
    assert "0 parameters read in place" in trainer.send_weights().path
    assert digests(theirs) == digests(mine)
    share(mine)
    assert "1 parameters read in place" in trainer.send_weights().path
    assert digests(theirs) == digests(mine)
    trainer.shutdown()
    worker.shutdown()


def test_a_view_that_is_held_of_one_adopted_parameter_is_no_concern_of_the_others() -> None:
    mine, theirs = nn.Linear(64, 64), nn.Linear(64, 64)
    trainer, worker = engine(mine, theirs, adopt=True)
    trainer.send_weights()
    held = theirs.weight.data[3]
    for _ in range(3):
        with torch.no_grad():
            mine.weight.add_(1)
            mine.bias.add_(1)
        details = trainer.send_weights().ranks[-1].details
        assert (details["adopted"], details["copied"]) == (1, 1)
        assert torch.equal(held, mine.weight[3])
        assert digests(theirs) == digests(mine)
    trainer.shutdown()
    worker.shutdown()
