"""Servers that die, stop or refuse in the middle of a push: the others commit, and the report says who did not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from plugins.cli.tests.scene import Model, State, held, info, run, run_json, serve_worker, write
from weightwire import FanoutClient, HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory
from weightwire.errors import PeerLost
from weightwire.report import TransferReport
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank
from weightwire.testing.pool_rank import at_tidy
from weightwire_nccl import NCCLTrainerInitInfo


class Fleet:
    """Three servers of one rank each, and a rank to send from."""

    def __init__(self, ranks: BorrowRanks, *, widths: tuple[int, ...] = (16, 16, 16)) -> None:
        self.sender, *self.workers = ranks(1 + len(widths))
        self.urls = [rank.call(serve_worker, width=width) for rank, width in zip(self.workers, widths, strict=True)]

    @property
    def to(self) -> list[str]:
        return [word for url in self.urls for word in ("--to", url)]

    def committed(self, *places: int) -> bool:
        """Whether these servers hold what was pushed, and one and the same."""
        return len({str(self.workers[place].call(held)) for place in places}) == 1 and all(
            self.workers[place].call(info)["weight_version"] == "new" for place in places
        )


def trainer(state: State, urls: list[str], policy: Any, value: float, **fields: Any) -> None:
    """Connect to the servers."""
    state["model"] = Model(value)
    servers = [HTTPVLLMWeightSyncClient(url) for url in urls]
    state["client"] = client = FanoutClient(servers, policy, patience=1.0)
    info = NCCLTrainerInitInfo(**{"timeout": 50.0, **fields})
    state["engine"] = client.persist(
        lambda: WeightTransferTrainerFactory.trainer_init(
            info, client=client, source=ModuleSource(state["model"], buffers=True)
        )
    )
    at_tidy(state["engine"].shutdown)
    for server in servers:
        at_tidy(server.close)


def send(state: State, label: str = "new") -> TransferReport:
    """Send to those that are there."""
    report: TransferReport = state["client"].persist(lambda: state["engine"].send_weights(weight_version=label))
    return report


POINTS = [
    pytest.param("communicator.connected", marks=pytest.mark.thorough),
    "communicator.first_piece",
    pytest.param("worker.voted", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("point", POINTS)
def test_one_of_three_is_killed(ranks: BorrowRanks, tmp_path: Path, point: str) -> None:
    fleet = Fleet(ranks)
    fleet.workers[1].at(point, "kill")
    path = str(write(tmp_path / "a.safetensors"))
    result, record = run_json(fleet.sender, "push", path, *fleet.to, "--policy", "quorum", "--label", "new", "--verify")
    assert not fleet.workers[1].alive
    assert result == 3
    first, dead, last = record["servers"]
    assert (first["error"], last["error"]) == (None, None)
    assert "worker rank 1" in dead["error"]
    assert f"pid {fleet.workers[1].pid}" in dead["error"]
    assert dead["workers"] == []
    assert fleet.committed(0, 2)


def test_policy_all_has_all_or_nobody(ranks: BorrowRanks, tmp_path: Path) -> None:
    fleet = Fleet(ranks)
    before = fleet.workers[0].call(held)
    fleet.workers[1].at("worker.vote", "kill")
    result, _, errors = fleet.sender.call(run, "push", str(write(tmp_path / "a.safetensors")), *fleet.to)
    assert result == 1
    assert f"worker rank 1 (pid {fleet.workers[1].pid}) was lost" in errors
    assert [fleet.workers[place].call(held) for place in (0, 2)] == [before] * 2


def test_a_quorum_is_more_than_half(ranks: BorrowRanks, tmp_path: Path) -> None:
    fleet = Fleet(ranks)
    path = str(write(tmp_path / "a.safetensors"))
    before = fleet.workers[0].call(held)
    fleet.workers[2].kill()
    fleet.workers[1].at("worker.begin", "kill")
    result, _, errors = fleet.sender.call(run, "push", path, *fleet.to, "--policy", "quorum")
    assert result == 1
    assert "policy 'quorum' is not met: 1 of 3 servers are left" in errors
    assert "worker rank 1" in errors
    assert fleet.workers[0].call(held) == before
    result, record = run_json(fleet.sender, "push", path, *fleet.to, "--policy", "best-effort", "--label", "new")
    assert result == 3
    assert [server["error"] is None for server in record["servers"]] == [True, False, False]
    assert "could not be reached" in record["servers"][2]["error"]
    assert fleet.committed(0)


def test_one_refuses(ranks: BorrowRanks, tmp_path: Path) -> None:
    fleet = Fleet(ranks, widths=(16, 17, 16))
    path = str(write(tmp_path / "a.safetensors"))
    options = ["--policy", "quorum", "--pause", "keep", "--label", "new"]
    result, output, _ = fleet.sender.call(run, "push", path, *fleet.to, *options)
    assert result == 3
    assert "worker rank 1" in output
    assert "'embed' has shape (4, 17) here" in " ".join(output.split())
    assert fleet.committed(0, 2)
    said = fleet.workers[1].call(info)
    assert (said["weight_version"], said["update"], said["gate"]) == ("default", "none", "open")


def restart(ranks: BorrowRanks, lost: Rank, url: str) -> Rank:
    """A new process at the same address."""
    (new,) = ranks(1)
    assert new.call(serve_worker, port=urlsplit(url).port) == url
    return new


def test_a_trainer_goes_on_without_it_and_takes_it_in_again(ranks: BorrowRanks) -> None:
    fleet = Fleet(ranks)
    fleet.sender.call(trainer, fleet.urls, "quorum", 7.0)
    assert [one.error for one in fleet.sender.call(send).servers] == [None] * 3
    fleet.workers[1].at("communicator.first_piece", "kill")
    report = fleet.sender.call(send)
    assert report.reinitialised
    assert [one.workers for one in report.servers] == [(0,), (), (1,)]
    assert f"pid {fleet.workers[1].pid}" in str(report.servers[1].error)
    report = fleet.sender.call(send)
    assert not report.reinitialised
    assert "could not be reached" in str(report.servers[1].error)
    fleet.workers[1] = restart(ranks, fleet.workers[1], fleet.urls[1])
    report = fleet.sender.call(send)
    assert [one.workers for one in report.servers] == [(0,), (1,), (2,)]
    assert fleet.committed(0, 1, 2)


@pytest.mark.thorough
def test_one_is_stopped(ranks: BorrowRanks) -> None:
    fleet = Fleet(ranks)
    fleet.sender.call(trainer, fleet.urls, "best_effort", 7.0, stall_limit=2.0, peer_timeout=3.0)
    fleet.workers[2].at("communicator.first_piece", "stop")
    began = time.monotonic()
    report = fleet.sender.call(send)
    assert [one.committed for one in report.servers] == [True, True, False]
    assert "worker rank 2" in str(report.servers[2].error)
    assert time.monotonic() - began < 15.0  # stall limit, then the time that a server has to say that it is there
    assert fleet.committed(0, 1)
    fleet.workers[2].resume()
    report = fleet.sender.call(send)
    assert [one.committed for one in report.servers] == [True] * 3
    assert fleet.committed(0, 1, 2)


def test_too_few_servers_from_the_start(ranks: BorrowRanks) -> None:
    fleet = Fleet(ranks)
    fleet.workers[0].kill()
    fleet.workers[1].kill()
    with pytest.raises(PeerLost, match="policy 'quorum' is not met: 1 of 3 servers are left"):
        fleet.sender.call(trainer, fleet.urls, "quorum", 7.0)


def test_one_belongs_to_another_trainer(ranks: BorrowRanks, tmp_path: Path) -> None:
    fleet = Fleet(ranks)
    (other,) = ranks(1)
    other.call(trainer, fleet.urls[1:2], "all", 5.0)
    path = str(write(tmp_path / "a.safetensors"))
    result, record = run_json(fleet.sender, "push", path, *fleet.to, "--policy", "best-effort", "--label", "new")
    assert result == 3
    assert "is connected and alive" in record["servers"][1]["error"]
    assert fleet.committed(0, 2)
