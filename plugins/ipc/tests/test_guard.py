"""Weights that change while they are read: whoever writes waits, or the round fails; never a mixture."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from plugins.ipc.tests.fleet import MODES, Scene, Zoo, blocks, digests, model_digests, options, send, step
from weightwire import faults
from weightwire.clients.local import LocalClient
from weightwire.errors import OrderError, PeerFailed, TransferError
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource
from weightwire.testing.fixtures import BorrowRanks
from weightwire.worker import Worker
from weightwire_ipc import IPCTrainerInitInfo, share

State = dict[str, Any]

CHANGED = "the weights changed while they were being sent"


def optimize(state: State) -> None:
    """A step of an optimizer over the model, in a thread of its own."""
    parameters = list(state["model"].parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=1.0).step()


def optimize_another(state: State) -> None:
    """A step of an optimizer that has nothing to do with the model."""
    other = nn.Linear(2, 2)
    other.weight.grad = torch.ones(2, 2)
    torch.optim.SGD(other.parameters(), lr=1.0).step()


def write_past(state: State) -> None:
    """A write that torch's version counters do not show."""
    list(state["model"].parameters())[-1].data[-1] = 5.0


def test_an_optimizer_of_another_thread_waits_until_the_read_is_over(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, "shared")
    scene.send()
    sending_from = scene.trainer.call(model_digests)
    scene.workers[1].at("ipc.copied", "hold")
    sending = scene.trainer.start(send, stepping=False)
    scene.workers[1].reached("ipc.copied")
    scene.trainer.call(optimize_another)
    stepping = scene.trainer.start(optimize)
    with pytest.raises(TimeoutError):
        stepping.result(0.2)
    assert scene.trainer.call(model_digests) == sending_from
    scene.workers[1].let_go("ipc.copied")
    sending.result()
    stepping.result()
    scene.check(scene.workers, sending_from)
    assert scene.trainer.call(model_digests) != sending_from
    scene.send()


def turned(state: State, value: float = 0.0) -> nn.Module:
    """Blocks, and one parameter that is sent from a copy since it lies in another order."""
    model = blocks(state, value)
    model.register_parameter("turned", nn.Parameter(torch.full((300, 200), value).t()))
    return model


@pytest.mark.parametrize(
    ("mode", "point"),
    [
        ("ring", "ipc.slot"),
        pytest.param("shared", "ipc.slot", marks=pytest.mark.thorough),
        pytest.param("adopt", "ipc.announced", marks=pytest.mark.thorough),
    ],
)
def test_an_optimizer_waits_also_where_a_parameter_is_not_contiguous(ranks: BorrowRanks, mode: str, point: str) -> None:
    scene = Scene(ranks, mode, workers=1, model=turned)
    sending_from = scene.send()["digests"]
    scene.trainer.at(point, "hold")
    sending = scene.trainer.start(send, stepping=False)
    scene.trainer.reached(point)
    stepping = scene.trainer.start(optimize)
    with pytest.raises(TimeoutError):
        stepping.result(0.2)
    scene.trainer.let_go(point)
    sending.result()
    stepping.result()
    scene.check(scene.workers, sending_from)
    assert scene.trainer.call(model_digests) != sending_from


@pytest.mark.parametrize("mode", MODES)
def test_a_write_in_place_meanwhile_leaves_every_worker_on_old_weights(ranks: BorrowRanks, mode: str) -> None:
    scene = Scene(ranks, mode)
    old = scene.send()["digests"]
    held, point = {
        "ring": (scene.trainer, "ipc.slot"),
        "shared": (scene.workers[0], "ipc.copied"),
        "adopt": (scene.workers[0], "ipc.adopted"),
    }[mode]
    held.at(point, "hold")
    sending = scene.trainer.start(send)
    held.reached(point)
    scene.trainer.call(step)
    held.let_go(point)
    with pytest.raises((TransferError, PeerFailed), match=CHANGED):
        sending.result()
    scene.check(scene.workers, old)
    assert scene.send()["report"]["reinitialised"]


@pytest.mark.parametrize("checksum", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_write_that_torch_does_not_show_is_found_by_the_checksum(ranks: BorrowRanks, checksum: bool) -> None:
    scene = Scene(ranks, "shared", checksum=checksum)
    old = scene.send()["digests"]
    scene.workers[0].at("worker.begin", "hold")
    scene.trainer.at("ipc.announced", "note")
    sending = scene.trainer.start(send)
    scene.workers[0].reached("worker.begin")
    scene.trainer.reached("ipc.announced")
    scene.trainer.call(write_past)
    scene.workers[0].let_go("worker.begin")
    if checksum:
        with pytest.raises((TransferError, PeerFailed), match="block_7.*the checksum differs"):
            sending.result()
        scene.check(scene.workers, old)
    else:
        sending.result()
    scene.send()


class Here:
    """A trainer and a worker in this process."""

    def __init__(self, mode: str, mine: nn.Module, theirs: nn.Module, **info: Any) -> None:
        self.mine, self.theirs = mine, theirs
        if mode == "shared":
            share(mine)
        self.engine = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(timeout=20, **options(mode), **info),
            client=LocalClient(Worker(theirs)),
            source=ModuleSource(mine),
        )

    def send(self) -> None:
        self.engine.send_weights()
        with torch.no_grad():
            assert all(map(torch.equal, self.mine.parameters(), self.theirs.parameters()))


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_steps_in_the_sending_thread_is_refused_at_once(mode: str) -> None:
    here = Here(mode, nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(here.mine.parameters(), lr=1.0)
    for parameter in here.mine.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, theirs = digests(here.mine), digests(here.theirs)
    faults.install(lambda point: optimizer.step() if point == "ipc.announced" else None)
    try:
        with pytest.raises(OrderError, match="optimizer steps in the thread that is sending"):
            here.engine.send_weights()
    finally:
        faults.install(None)
    assert (digests(here.mine), digests(here.theirs)) == (before, theirs)
    optimizer.step()
    here.send()
    here.engine.shutdown()


def test_an_optimizer_that_is_in_the_midst_of_a_step_is_told_of() -> None:
    here = Here("shared", nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(here.mine.parameters(), lr=1.0)
    inside, go_on = threading.Event(), threading.Event()

    def closure() -> float:
        inside.set()
        assert go_on.wait(20)
        return 0.0

    stepping = threading.Thread(target=lambda: optimizer.step(closure))
    stepping.start()
    assert inside.wait(20)
    with pytest.raises(TransferError, match=f"{CHANGED}: an optimizer was stepping in another thread"):
        here.engine.send_weights()
    go_on.set()
    stepping.join()
    here.send()
    here.engine.shutdown()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_step_that_raises_does_not_stand_in_the_way_of_what_is_sent_later(elsewhere: bool) -> None:
    here = Here("shared", nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(here.mine.parameters(), lr=1.0)

    def closure() -> float:
        raise ZeroDivisionError

    def stepping() -> None:
        with pytest.raises(ZeroDivisionError):
            optimizer.step(closure)

    if elsewhere:
        thread = threading.Thread(target=stepping)
        thread.start()
        thread.join()
        # Nobody tells that the step is over, so it is reported once.
        with pytest.raises(TransferError, match="an optimizer was stepping"):
            here.engine.send_weights()
    else:
        stepping()
    here.send()
    here.send()
    here.engine.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_weights_made_under_inference_mode_are_sent(mode: str) -> None:
    with torch.inference_mode():
        mine = Zoo(1, width=30)
    here = Here(mode, mine, Zoo(0, width=30))
    here.engine.send_weights()
    with torch.inference_mode():
        assert digests(mine) == digests(here.theirs)
    here.engine.shutdown()
