"""Every byte arrives, on every worker, whichever way it goes; and what a refusal or many rounds leave behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from core.tests.distributed_ranks import process_group
from plugins.ipc.tests.fleet import (
    MODES,
    Scene,
    Zoo,
    close,
    details,
    digests,
    drive,
    filled,
    hold_port,
    loading,
    model_digests,
    open_trainer,
    send,
    zoo,
)
from plugins.ipc.tests.fleet import options as small
from weightwire.clients.fanout import FanoutClient
from weightwire.clients.local import LocalClient
from weightwire.errors import UpdateRefused
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource, StateDictSource
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.workers import host_workers
from weightwire.worker import Worker
from weightwire_ipc import IPCTrainerInitInfo, share

State = dict[str, Any]

PATHS = {
    "ring": "shared memory, 0 parameters read in place, 11 through a ring",
    "shared": "shared memory, 11 parameters read in place, 0 through a ring",
    "adopt": "shared memory, one copy for all that adopt it",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_zoo_of_parameters_in_many_rounds(strict_ranks: BorrowRanks, mode: str, workers: int) -> None:
    scene = Scene(strict_ranks, mode, workers=workers, model=zoo, trained=(1,), checksum=True)
    for number in range(4):
        sent = scene.send()
        assert sent["report"]["path"] == PATHS[mode]
        assert sent["report"]["round"] == number
        assert sent["report"]["verified"]
        for place in range(workers):
            found = details(sent, f"worker rank {place}")
            assert found["adopted" if mode == "adopt" else "swapped"] == 11
            if number > 2:
                assert found["allocated_bytes"] == 0
    scene.trainer.call(close)


class Here:
    """A trainer and a worker in this process."""

    def __init__(self, mode: str, mine: nn.Module, theirs: Any, options: State | None = None, **info: Any) -> None:
        self.mine, self.theirs = mine, theirs
        if mode == "shared":
            share(mine)
        self.worker = Worker(theirs, **options or {})
        self.engine = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(**{"timeout": 20, **small(mode), **info}),
            client=LocalClient(self.worker),
            source=ModuleSource(mine),
        )

    def send(self) -> str:
        path = self.engine.send_weights().path
        assert digests(self.mine) == digests(self.theirs)
        return path

    def close(self) -> None:
        self.engine.shutdown()
        self.worker.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_loads_weights_itself(mode: str) -> None:
    here = Here(mode, Zoo(1, width=100), loading({}, 0, 100), checksum=True)
    for _ in range(3):
        with torch.no_grad():
            here.mine.get_parameter("wide").add_(1)
        here.send()
    here.close()


@pytest.mark.parametrize("nbytes", [64, 1000, 1 << 14])
@pytest.mark.parametrize("count", [1, 3])
def test_rings_of_all_sizes(nbytes: int, count: int) -> None:
    info: State = {"packed_buffer_size_bytes": nbytes, "packed_num_buffers": count}
    here = Here("ring", Zoo(1, width=50), Zoo(0, width=50), checksum=True, **info)
    for _ in range(2):
        here.send()
    here.close()


class Odd(nn.Module):
    """Empty, transposed and tied parameters, and two over one storage, among others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.plain = filled((300, 40), torch.float32, generator)
        self.hollow = filled((0, 4), torch.bfloat16, generator)
        self.turned = nn.Parameter(filled((30, 20), torch.float32, generator).data.t(), requires_grad=False)
        self.tied = self.plain
        flat = filled((100,), torch.float32, generator).data
        self.left = nn.Parameter(flat[:64], requires_grad=False)
        self.right = nn.Parameter(flat[60:], requires_grad=False)


@pytest.mark.parametrize("mode", MODES)
def test_odd_parameters(mode: str) -> None:
    here = Here(mode, Odd(1), Odd(0), checksum=True)
    here.send()
    here.send()
    here.close()


def test_what_is_empty_keeps_nothing_else_from_being_read_in_place() -> None:
    mine, theirs = Zoo(1, width=20), Zoo(0, width=20)
    for model in (mine, theirs):
        model.hollow = nn.Parameter(torch.empty(0, 4))
    here = Here("shared", mine, theirs, checksum=True)
    assert here.send() == "shared memory, 11 parameters read in place, 1 through a ring"
    here.close()


@pytest.mark.parametrize("mode", [pytest.param("ring", marks=pytest.mark.thorough), *MODES[1:]])
def test_more_parameters_than_are_looked_at_together(mode: str) -> None:
    def many(value: float) -> nn.Module:
        return nn.ParameterList(torch.full((2,), value + place) for place in range(1500))

    here = Here(mode, many(0.5), many(0.0))
    path = here.send()
    assert path == PATHS[mode].replace("11", "1500")
    with torch.no_grad():
        here.mine.get_parameter("1400").zero_()
    here.send()
    here.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_is_not_strict_takes_what_it_knows(mode: str) -> None:
    mine, theirs = Zoo(1, width=20), Zoo(0, width=20)
    mine.first = nn.Parameter(torch.ones(3))
    mine.another = nn.Parameter(torch.ones(1 << 18))
    here = Here(mode, mine, theirs, {"strict": False}, checksum=True)
    for _ in range(3):
        here.engine.send_weights()
        expected = digests(mine)
        assert {name: expected[name] for name, _ in theirs.named_parameters()} == digests(theirs)
    here.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_casts(mode: str) -> None:
    mine, theirs = nn.Linear(40, 40), nn.Linear(40, 40, dtype=torch.bfloat16)
    here = Here(mode, mine, theirs, {"cast": True}, checksum=True)
    for _ in range(3):
        with torch.no_grad():
            mine.weight.mul_(1.1)
        here.engine.send_weights()
        assert torch.equal(theirs.weight, mine.weight.bfloat16())
        assert torch.equal(theirs.bias, mine.bias.bfloat16())
    here.close()


@pytest.mark.parametrize("mode", MODES)
def test_what_does_not_fit_is_refused_and_the_link_stays(mode: str) -> None:
    mine, theirs = nn.Linear(4, 4), nn.Linear(4, 5)
    here = Here(mode, mine, theirs)
    before = digests(theirs)
    for _ in range(2):
        with pytest.raises(UpdateRefused, match="'weight'"):
            here.engine.send_weights()
        assert digests(theirs) == before
        assert here.worker.state == "ready"
        assert here.engine.linked
    here.close()


def test_a_model_that_is_shared_after_the_first_round() -> None:
    here = Here("ring", Zoo(1, width=20), Zoo(0, width=20), checksum=True)
    assert here.send() == PATHS["ring"]
    share(here.mine)
    assert here.send() == PATHS["shared"]
    here.mine.wide = nn.Parameter(torch.ones(20, 20), requires_grad=False)
    assert here.send() == "shared memory, 10 parameters read in place, 1 through a ring"
    here.mine.get_parameter("scalar").data = torch.tensor(4.0)
    assert here.send() == "shared memory, 9 parameters read in place, 2 through a ring"
    share(here.mine)
    assert here.send() == PATHS["shared"]
    here.close()


def test_a_source_that_makes_its_tensors_anew_in_every_round() -> None:
    mine, theirs = Zoo(1, width=80), Zoo(0, width=80)

    def made() -> dict[str, torch.Tensor]:
        return {name: parameter.clone() for name, parameter in mine.named_parameters()}

    for adopt in (False, True):
        worker = Worker(theirs)
        engine = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(timeout=20, checksum=True, adopt=adopt),
            client=LocalClient(worker),
            source=StateDictSource(made),
        )
        for _ in range(3):
            with torch.no_grad():
                mine.get_parameter("wide").add_(1)
            engine.send_weights()
            assert digests(theirs) == digests(mine)
        engine.shutdown()


@pytest.mark.parametrize("mode", [*MODES[:2], pytest.param("adopt", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_trainer_ranks_that_own_in_turn(ranks: BorrowRanks, mode: str, count: int) -> None:
    trainers, workers = ranks(count), ranks(2)
    client = FanoutClient([host_workers([worker], zoo) for worker in workers])
    port = trainers[0].call(hold_port)
    opening = [
        rank.start(open_trainer, client, mode=mode, rank=place, count=count, owned=True, port=port, checksum=True)
        for place, rank in enumerate(trainers)
    ]
    for call in opening:
        call.result()
    for _ in range(3):
        sending = [rank.start(send, "x") for rank in trainers]
        sent = [call.result() for call in sending]
        assert [worker.call(model_digests) for worker in workers] == [sent[0]["digests"]] * 2
    bytes_of = {rank["rank"]: rank["bytes"] for rank in sent[0]["report"]["ranks"]}
    assert all(bytes_of[f"trainer rank {place}"] > 0 for place in range(count))
    closing = [rank.start(close) for rank in trainers]
    for call in closing:
        call.result()


def sharded(seed: float) -> nn.Module:
    torch.manual_seed(int(seed))
    return nn.Sequential(nn.Linear(33, 20), nn.Linear(20, 7))


def served(state: State) -> nn.Module:
    state["model"] = model = sharded(0)
    return model


def send_sharded(state: State, client: Any, rank: int, count: int, port: int, adopt: bool) -> dict[str, str]:
    """A round from a model under FSDP2; returns what the whole model was."""
    model = sharded(5)
    whole = digests(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(
            rank=rank,
            num_trainer_ranks=count,
            secret="5a" * 16,
            master_port=port,
            listen_socket=state.pop("held", None),
            timeout=20,
            checksum=True,
            adopt=adopt,
        ),
        client=client,
        source=ModuleSource(model),
    )
    for _ in range(2):
        engine.send_weights()
    engine.shutdown()
    return whole


def test_a_sharded_model_is_gathered(ranks: BorrowRanks, tmp_path: Path) -> None:
    (worker,) = ranks(1)
    client = host_workers([worker], served)
    with process_group(ranks, 2, tmp_path) as group:
        for adopt in (False, True):
            port = group.ranks[0].call(hold_port)
            sending = [
                rank.start(send_sharded, client, place, 2, port, adopt) for place, rank in enumerate(group.ranks)
            ]
            whole = [call.result(40) for call in sending]
            assert worker.call(model_digests) == whole[0]


@pytest.mark.thorough
def test_a_trainer_that_turns_to_other_workers(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, "adopt", workers=1)
    old = scene.send()["digests"]
    first = scene.workers
    scene.workers = ranks(1)
    scene.clients = [host_workers(scene.workers, scene.model)]
    scene.trainer.call(drive, scene.clients[0])
    # The link is to the first worker as long as it stands.
    first[0].kill()
    sent = scene.send()
    assert sent["report"]["reinitialised"]
    assert sent["digests"] != old


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "no parameter at all": nn.Module,
    "nothing but an empty one": lambda: nn.ParameterList([torch.empty(0, 3)]),
    "one single number": lambda: nn.ParameterList([torch.tensor(1.0)]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", FACTORIES)
def test_models_of_next_to_nothing(mode: str, kind: str) -> None:
    here = Here(mode, FACTORIES[kind](), FACTORIES[kind](), checksum=True)
    here.send()
    here.send()
    here.close()
