from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from weightwire.clients.fanout import FanoutClient
from weightwire.clients.protocol import ControlClient, VLLMWeightSyncClient
from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, MessageError, OrderError, PeerLost, UpdateRefused
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool import Rank
from weightwire.testing.worker_host import host, worker_of
from weightwire.testing.workers import RankClient, host_workers

State = dict[str, Any]


class Recorder:
    """Has a worker's methods and keeps what they were called with."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.blocked = threading.Event()

    def _note(self, method: str, deadline: Deadline | None = None, **arguments: Any) -> None:
        self.calls.append((method, {**arguments, "bounded": deadline is not None}))

    def init(self, init_info: dict[str, Any], *, deadline: Deadline | None = None) -> None:
        self._note("init", deadline, init_info=init_info)
        if init_info.get("refused_by") == self.index:
            raise UpdateRefused("not here", parameter="a", rank=f"worker rank {self.index}")

    def start(self, *, update_id: str | None = None, draft: bool = False, deadline: Deadline | None = None) -> None:
        self._note("start", deadline, update_id=update_id, draft=draft)

    def update(
        self,
        update_info: dict[str, Any],
        *,
        update_id: str | None = None,
        sequence: int | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self._note("update", deadline, update_info=update_info, update_id=update_id, sequence=sequence)
        if update_info.get("blocks"):
            self.blocked.wait(20)

    def finish(
        self,
        weight_version: str | None = None,
        *,
        update_id: str | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self._note("finish", deadline, weight_version=weight_version, update_id=update_id)

    def abort(self, *, update_id: str | None = None, deadline: Deadline | None = None) -> bool:
        self.blocked.set()
        return False

    def shutdown(self, *, deadline: Deadline | None = None) -> None:
        self._note("shutdown", deadline)

    def pause(self, mode: str = "abort", *, deadline: Deadline | None = None) -> None:
        self._note("pause", deadline, mode=mode)

    def resume(self) -> None:
        self._note("resume")

    def info(self) -> dict[str, Any]:
        return {"rank": self.index}


def record(state: State, index: int) -> str:
    return host(state, Recorder(index))


def calls(state: State) -> list[tuple[str, dict[str, Any]]]:
    recorder: Any = worker_of(state)
    found: list[tuple[str, dict[str, Any]]] = recorder.calls
    return found


def drive(state: State, client: RankClient) -> list[dict[str, Any]]:
    client.start_weight_update()
    client.finish_weight_update("v1")
    found: list[dict[str, Any]] = client.weight_info()["ranks"]
    return found


def build(state: State, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(width, 2)


def recorders(ranks: list[Rank]) -> RankClient:
    addresses = [rank.call(record, rank.index) for rank in ranks]
    return RankClient(addresses, [f"worker rank {rank.index}" for rank in ranks], timeout=10)


def test_it_is_a_client_of_both_kinds(strict_ranks: BorrowRanks) -> None:
    client = recorders(strict_ranks(1))
    assert isinstance(client, ControlClient)
    assert isinstance(client, VLLMWeightSyncClient)
    assert client.get_world_size() == 1


def test_an_update_has_one_id_and_counted_messages(strict_ranks: BorrowRanks) -> None:
    ranks = strict_ranks(2)
    client = recorders(ranks)
    client.init_weight_transfer_engine({"a": 1})
    client.start_weight_update(timeout=3)
    client.update_weights({"all": True})
    client.update_weights([{"for": 0}, {"for": 1}])
    client.finish_weight_update("v1")
    client.start_weight_update(update_id="given")
    client.pause("keep")
    client.resume()
    client.shutdown_weight_transfer_engine()
    for index, rank in enumerate(ranks):
        found = rank.call(calls)
        update = found[1][1]["update_id"]
        assert len(update) == 32
        assert [name for name, _ in found] == [
            "init", "start", "update", "update", "finish", "start", "pause", "resume", "shutdown",
        ]  # fmt: skip
        assert found[2][1]["update_info"] == {"all": True}
        assert found[3][1]["update_info"] == {"for": index}
        assert [found[position][1]["sequence"] for position in (2, 3)] == [0, 1]
        assert {found[position][1]["update_id"] for position in (1, 2, 3, 4)} == {update}
        assert found[5][1]["update_id"] == "given"
        assert all(arguments["bounded"] for name, arguments in found if name != "resume")


def test_a_list_of_the_wrong_length_goes_nowhere(strict_ranks: BorrowRanks) -> None:
    ranks = strict_ranks(2)
    client = recorders(ranks)
    with pytest.raises(MessageError, match="1 elements for 2 workers"):
        client.update_weights([{}])
    assert ranks[0].call(calls) == []


def test_an_error_keeps_class_and_fields(strict_ranks: BorrowRanks) -> None:
    client = recorders(strict_ranks(2))
    with pytest.raises(UpdateRefused, match="not here") as raised:
        client.init_weight_transfer_engine({"refused_by": 1})
    assert (raised.value.parameter, raised.value.rank) == ("a", "worker rank 1")
    assert "in init" in str(raised.value.__cause__)


def test_a_killed_rank_is_lost(ranks: BorrowRanks) -> None:
    first, second = ranks(2)
    client = recorders([first, second])
    second.kill()
    with pytest.raises(PeerLost, match="worker rank 1 was lost during start"):
        client.start_weight_update()
    assert first.call(calls)[0][0] == "start"


def test_a_rank_killed_during_a_call_is_lost_while_another_blocks(ranks: BorrowRanks) -> None:
    first, second, trainer = ranks(3)
    client = recorders([first, second])
    pending = trainer.start(update_blocking, client)
    while not second.call(calls):
        pass
    second.kill()
    with pytest.raises(PeerLost, match="worker rank 1 was lost during update"):
        pending.result()


def update_blocking(state: State, client: RankClient) -> None:
    client.update_weights({"blocks": True})


def test_a_stopped_rank_is_named_at_the_deadline(ranks: BorrowRanks) -> None:
    first, second = ranks(2)
    client = recorders([first, second])
    client.grace = 0.1
    second.stop()
    with pytest.raises(DeadlineExceeded, match="start was not answered in time by worker rank 1"):
        client.start_weight_update(timeout=0.1)


def test_another_rank_can_drive(strict_ranks: BorrowRanks) -> None:
    first, second, trainer = strict_ranks(3)
    assert trainer.call(drive, recorders([first, second])) == [{"rank": 0}, {"rank": 1}]
    assert [name for name, _ in second.call(calls)] == ["start", "finish"]


def test_real_workers_answer_and_refuse(strict_ranks: BorrowRanks) -> None:
    servers = [host_workers(strict_ranks(2), build, 3), host_workers(strict_ranks(1), build, 3)]
    fleet = FanoutClient(servers)
    assert fleet.get_world_size() == 3
    info = servers[0].weight_info()
    assert info["state"] == "uninitialised"
    assert [one["rank"] for one in info["ranks"]] == [0, 1]
    assert servers[0].checksums()[0] == servers[1].checksums()[0]
    with pytest.raises(OrderError, match="init"):
        fleet.start_weight_update()
    fleet.abort_weight_update()
    fleet.shutdown_weight_transfer_engine()
