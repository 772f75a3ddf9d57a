"""`weightwire serve --workers 2` and the same under torchrun: real processes, and what a killed one leaves."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightwire.clients.http import HTTPVLLMWeightSyncClient
from weightwire.errors import WeightwireError
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource
from weightwire.trainer import TrainerWeightTransferEngine
from weightwire_nccl import NCCLTrainerInitInfo

FACTORY = """
import os, signal
from pathlib import Path
from torch import nn
from weightwire import faults

ORDER = Path(__file__).with_name("order")

def die_on_order(point):
    if ORDER.exists() and ORDER.read_text() == f"{os.environ['RANK']} {point}":
        ORDER.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

def model():
    faults.install(die_on_order)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
"""
LIMIT = 40.0


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


class Server:
    """A server that runs.

    Attributes:
        process: The front.
        url: Where it is.
        folder: Where its factory is.
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("weightwire: serving at http://127.0.0.1:"), line
        self.url = line.split()[3].rstrip(",")
        self.process = process
        self.folder = folder
        self.client = HTTPVLLMWeightSyncClient(self.url)

    def whole(self) -> bool:
        """Whether all ranks are there."""
        return bool(self.client.weight_info()["state"] != "lost")

    def rank(self, rank: int) -> dict[str, Any]:
        """What it says of one rank."""
        known: dict[str, Any] = self.client.weight_info()["ranks"][rank]
        return known


@contextmanager
def program(folder: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "tiny.py").write_text(FACTORY)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "weightwire_cli.serve", "tiny:model", "--port", "0", *arguments]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests of this module; at the end its front is killed, and no rank outlives it."""
    folder = tmp_path_factory.mktemp("served")
    with program(folder, "--workers", "2") as front:
        server = Server(front, folder)
        yield server
        until(server.whole)
        pids = [server.rank(rank)["pid"] for rank in range(2)]
        server.client.close()
        front.kill()
        until(lambda: all(gone(pid) for pid in pids))


@pytest.fixture
def server(running: Server) -> Server:
    """The server of this module's tests, with all its ranks."""
    until(running.whole)
    return running


def model(value: float) -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


@contextmanager
def trainer(server: Server, value: float) -> Iterator[TrainerWeightTransferEngine[Any]]:
    engine = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(timeout=30.0), client=server.client, source=ModuleSource(model(value))
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def check_a_push(server: Server, engine: TrainerWeightTransferEngine[Any], label: str) -> None:
    """The next push goes through, whatever came before, and every rank has it."""
    report = engine.send_weights(weight_version=label, pause="keep")
    known = server.client.weight_info()
    assert (known["state"], known["weight_version"], known["revision"]) == ("ready", label, report.revision)
    sums = server.client.weight_checker("checksum")["checksums"]
    assert len(sums) == 8
    assert {sums[key] == sums[key.replace(":tp0:", ":tp1:")] for key in sums} == {True}


def test_a_push_to_every_rank(server: Server) -> None:
    assert server.client.get_world_size() == 2
    with trainer(server, 1.0) as engine:
        check_a_push(server, engine, "one")
        check_a_push(server, engine, "two")


def test_a_rank_killed_while_nothing_happens(server: Server) -> None:
    with trainer(server, 2.0) as engine:
        check_a_push(server, engine, "before")
        victim = server.rank(1)["pid"]
        os.kill(victim, signal.SIGKILL)
        until(lambda: not server.whole())
        until(lambda: "SIGKILL" in str(server.client.weight_info()["reason"]))
        assert f"(pid {victim}) was killed by SIGKILL" in server.client.weight_info()["reason"]
        with pytest.raises(WeightwireError, match=rf"pid {victim}"):
            engine.send_weights()
        until(server.whole)
        assert server.client.weight_info()["state"] == "torn"  # the new rank has what its factory made
        check_a_push(server, engine, "after")


@pytest.mark.parametrize(
    ("point", "torn"), [pytest.param("worker.vote", False, marks=pytest.mark.thorough), ("worker.voted", True)]
)
def test_a_rank_killed_during_an_update(server: Server, point: str, torn: bool) -> None:
    with trainer(server, 3.0) as engine:
        check_a_push(server, engine, "before")
        before = server.rank(0)["revision"]
        (server.folder / "order").write_text(f"1 {point}")
        with pytest.raises(WeightwireError, match=r"rank 1"):
            engine.send_weights(weight_version="lost")
        # All or none: only a rank that dies after the vote leaves the others' weights behind its own.
        assert (server.rank(0)["revision"] != before) == torn
        until(server.whole)
        assert server.client.weight_info()["state"] == "torn"
        check_a_push(server, engine, "after")


def test_ranks_that_a_launcher_started(tmp_path: Path) -> None:
    """As torchrun starts them: with RANK and WORLD_SIZE, and nobody of us is their parent."""
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": secrets.token_hex(8)}
    with program(tmp_path, RANK="0", **launcher) as front, program(tmp_path, RANK="1", **launcher) as other:
        server = Server(front, tmp_path)
        with trainer(server, 4.0) as engine:
            check_a_push(server, engine, "one")
        server.client.close()
        front.terminate()
        assert front.wait(LIMIT) == 0
        assert other.wait(LIMIT) == 0  # its front is gone
