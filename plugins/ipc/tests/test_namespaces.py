"""Workers in other namespaces, and of other users: what works, and what is said where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.ipc.tests.fleet import Zoo, digests, settled
from plugins.ipc.tests.namespaces import require_root, require_unshare
from plugins.ipc.tests.test_doorway import NOBODY, SECRET, admit, come, opened, visit
from weightwire.clients.local import LocalClient
from weightwire.deadline import Deadline
from weightwire.errors import HandshakeError, WeightwireError
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank
from weightwire.testing.workers import RankClient
from weightwire.worker import Worker
from weightwire_ipc import IPCTrainerInitInfo
from weightwire_ipc.host import identity

State = dict[str, Any]


KNOCKING = """
import json, sys
from weightwire.deadline import Deadline
from weightwire.errors import WeightwireError
from weightwire_ipc.doorway import knock
for line in sys.stdin:
    address, secret, place = json.loads(line)
    try:
        knock(address, peer="trainer rank 0", member=0, secret=bytes.fromhex(secret), trainer=place,
              deadline=Deadline(10)).close()
        print("welcome", flush=True)
    except WeightwireError as error:
        print(type(error).__name__, str(error), flush=True)
"""


@contextmanager
def process(command: list[str], script: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that is talked to by lines."""
    with subprocess.Popen(
        [*command, sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def ask(running: subprocess.Popen[str], *words: Any) -> str:
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write(json.dumps(words) + "\n")
    running.stdin.flush()
    return running.stdout.readline()


def test_another_network_namespace(socket_directory: Path) -> None:
    with process(require_unshare("-n"), KNOCKING) as other:
        with opened() as doorway:
            said = ask(other, doorway.address, SECRET.hex(), identity())
            assert said.startswith("HandshakeError")
            assert "different network namespaces" in said
            assert "socket_directory=" in said
        with opened(socket_directory) as doorway:
            admitting = threading.Thread(target=admit, args=(doorway,))
            admitting.start()
            assert ask(other, doorway.address, SECRET.hex(), identity()) == "welcome\n"
            admitting.join()
        said = ask(other, str(socket_directory / "gone"), SECRET.hex(), identity())
        assert f"without a view of that directory: mount {socket_directory}" in said


def become(state: State, user: int) -> None:
    """Be another user from now on, in the whole process; whatever is imported later may not be readable then."""
    worker = Worker(Zoo(0, width=8))
    trainer = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(), client=LocalClient(worker), source=ModuleSource(Zoo(1, width=8))
    )
    trainer.shutdown()
    state["worker"] = worker
    os.setgid(user)
    os.setuid(user)


def told(state: State, init_info: dict[str, Any]) -> str:
    """What the worker here says to an init."""
    try:
        state["worker"].init(init_info, deadline=Deadline(10, what="init"))
    except WeightwireError as error:
        return str(error)
    return ""


class Calls:
    """A control plane to a worker in a rank that is called by the test, since its user may not be talked to else."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.heard = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
        self.heard = self.rank.call(told, init_info)
        raise HandshakeError(self.heard)

    def get_world_size(self, include_dp: bool = True) -> int:
        return 1


def test_another_user(ranks: BorrowRanks) -> None:
    require_root()
    (other,) = ranks(1)
    other.call(become, NOBODY)
    try:
        refused_to_another_user(other)
    finally:
        other.kill()


def refused_to_another_user(other: Rank) -> None:
    words = f"the trainer runs as user 0 and the worker as user {NOBODY}"
    with opened() as doorway:
        with pytest.raises(HandshakeError, match=f"trainer rank 0: {words}.*run both as one user"):
            other.call(come, doorway.address, 0, place=identity())
        # One that says nothing of its user is known by the kernel.
        place = {key: value for key, value in identity().items() if key != "uid"}
        with pytest.raises(HandshakeError, match=f"trainer rank 0 is a process of user 0 and this is one of {NOBODY}"):
            other.call(come, doorway.address, 0, place=place)
        visiting = threading.Thread(target=visit, args=(doorway.address,))
        visiting.start()
        admit(doorway)
        visiting.join()
    client: Any = Calls(other)
    with pytest.raises(HandshakeError, match=f"worker rank 0.*{words}"):
        WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(timeout=10), client=client, source=ModuleSource(torch.nn.Linear(2, 2))
        )
    settled(lambda: words in client.heard)


WORKER = """
import json, os, sys
import torch
from plugins.ipc.tests.fleet import Zoo, digests
from weightwire import Worker
from weightwire.testing.worker_host import host
torch.set_num_threads(1)
model = Zoo(0, width=100)
worker = Worker(model)
for line in sys.stdin:
    (command,) = json.loads(line)
    if command == "host":
        print(host({}, worker), flush=True)
    elif command == "digests":
        print(json.dumps(digests(model)), flush=True)
"""


def test_other_mount_and_pid_namespaces_make_no_difference() -> None:
    with process(require_unshare("-m", "-p", "-f"), WORKER) as other:
        client = RankClient([ask(other, "host").strip()], ["worker rank 0"])
        for adopt in (False, True):
            model = Zoo(1 + adopt, width=100)
            engine = WeightTransferTrainerFactory.trainer_init(
                IPCTrainerInitInfo(checksum=True, timeout=20, adopt=adopt), client=client, source=ModuleSource(model)
            )
            engine.send_weights()
            assert json.loads(ask(other, "digests")) == digests(model)
            engine.shutdown()
