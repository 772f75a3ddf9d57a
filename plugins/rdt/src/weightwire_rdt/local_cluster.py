"""A Ray cluster on this host, in processes of its own, for as long as it is needed: benchmarks, tests, a first try."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Self

from weightwire.errors import TransportUnavailable

_HEAD = """
import sys
import ray
ray.init(num_cpus=int(sys.argv[2]), object_store_memory=int(sys.argv[3]), _temp_dir=sys.argv[1],
         include_dashboard=False, logging_level="error", log_to_driver=False, configure_logging=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
_LEAVE_SECONDS = 30.0
_TRIES = 3
"""Ray gives a node half a minute to start, which is not always enough on a busy machine."""


class LocalCluster:
    """A head node; all of it ends with the context, or with this process.

    Args:
        cpus: Processors that it says it has.
        object_store_bytes: Size of its object store.

    Attributes:
        variables: What a process must have in its environment to join it.

    Raises:
        TransportUnavailable: It did not start.
    """

    def __init__(self, *, cpus: int = 4, object_store_bytes: int = 256 << 20) -> None:
        self._cpus = cpus
        self._object_store_bytes = object_store_bytes
        self.variables: dict[str, str] = {}

    def __enter__(self) -> Self:
        for _ in range(_TRIES):
            if self._start():
                return self
            self.__exit__(None, None, None)
        raise TransportUnavailable("the head of a local Ray cluster did not start; its words are above")

    def _start(self) -> bool:
        # Ray's sockets have long names, and the path to a socket may not have more than 107 bytes.
        self._directory = tempfile.TemporaryDirectory(prefix="rdt-", dir="/tmp", ignore_cleanup_errors=True)
        access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | access
        # Otherwise every process that joins has as many workers started as there are processors, for no task.
        # And what it starts would yield to every other process; but here the others wait for it.
        environment |= {"RAY_worker_niceness": "0"}
        environment |= {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
        arguments = [self._directory.name, str(self._cpus), str(self._object_store_bytes)]
        self._head = subprocess.Popen(
            [sys.executable, "-c", _HEAD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self._head.stdout is not None
        address = self._head.stdout.readline().strip()
        self.variables = {"RAY_ADDRESS": address, **access} if address else {}
        return bool(address)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._head.stdin is not None and self._head.stdout is not None
        self._head.stdin.close()
        try:
            self._head.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._head.kill()
            self._head.wait()
        self._head.stdout.close()
        self._directory.cleanup()
