"""A second Ray node on this machine, whose processes can all be killed at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from plugins.rdt.tests.cluster import Cluster
from weightwire.deadline import Deadline
from weightwire.testing.pool_rank import count_no_leftovers
from weightwire_rdt.nixl_agent import process_agent

_MARK = "WEIGHTWIRE_TEST_NODE"
_START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")
_UP = "Ray runtime started"
_TRIES = 3


class SecondNode:
    """A node that joins a cluster; its processes end with the context.

    Attributes:
        resource: A custom resource that it alone has, without end.
        address: Its IP address.
    """

    address = "127.0.0.2"

    def __init__(self, cluster: Cluster) -> None:
        self.resource = f"node-{uuid.uuid4().hex}"
        self._variables = cluster.variables

    def __enter__(self) -> Self:
        for _ in range(_TRIES):  # Ray gives a raylet thirty seconds, which a busy machine may exceed
            said = self._start()
            if _UP in said:
                return self
            self._leave()
        raise AssertionError(f"the second node did not start: {said}")

    def _start(self) -> str:
        """Have it start; returns what it said until it was up, or ended."""
        # Everything that it starts has the mark in its environment, whoever its parent is.
        marked = {**os.environ, **self._variables, _MARK: self.resource, "RAY_worker_niceness": "0"}
        options = {
            "--address": self._variables["RAY_ADDRESS"],
            "--node-ip-address": self.address,
            "--num-cpus": "2",
            "--object-store-memory": str(100 << 20),
            "--resources": json.dumps({self.resource: 100}),
        }
        words = [word for option in options.items() for word in option]
        self._starter = subprocess.Popen(
            [*_START, *words], env=marked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._starter.stdout is not None
        said = ""
        for line in self._starter.stdout:
            said += line
            if _UP in line:
                break
        return said

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self.kill()
        assert self._starter.stdout is not None
        self._starter.stdout.close()

    def kill(self) -> None:
        """SIGKILL to its raylet, its agents and its workers; returns when all are gone."""
        deadline = Deadline(20, what="the second node to be gone")
        while self._signal(signal.SIGKILL):  # again, should one have been about to start another
            deadline.sleep(0.01)
        self._starter.wait(deadline.remaining())

    def stop(self) -> None:
        """SIGSTOP to all of them: the node falls silent, and its connections stay."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> int:
        processes = self._processes()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        return len(processes)

    def _processes(self) -> list[int]:
        mark = f"{_MARK}={self.resource}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            # One that has gone, or is another user's, is none of them; of one that ended nothing is there to read.
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


def join_at(state: dict[str, Any], variables: dict[str, str], address: str) -> str:
    """Put this rank, a fresh one, into the cluster on the node with this address; returns that one's id."""
    os.environ.update(variables)
    import ray

    ray.init(address=variables["RAY_ADDRESS"], _node_ip_address=address, logging_level="warning", log_to_driver=False)
    process_agent()
    count_no_leftovers()
    return str(ray.get_runtime_context().get_node_id())
