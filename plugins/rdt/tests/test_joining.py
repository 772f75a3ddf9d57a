"""A process that joins a Ray cluster because its link needs one."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from plugins.rdt.tests.cluster import Cluster
from weightwire.testing.pool import held_socket

_JOIN = """
import signal
from weightwire.errors import TransportUnavailable
from weightwire_rdt.cluster import join_cluster
def own(number, frame): ...
signal.signal(signal.SIGTERM, own)
try:
    join_cluster()
except TransportUnavailable as error:
    print(error)
print("kept" if signal.getsignal(signal.SIGTERM) is own else "replaced")
"""


def join(**variables: str) -> str:
    """What a new process says that joins."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | variables
    done = subprocess.run(
        [sys.executable, "-c", _JOIN], env=environment, capture_output=True, text=True, timeout=150, check=True
    )
    return done.stdout


def test_the_handler_of_a_signal_stays(cluster: Cluster) -> None:
    assert join(**cluster.variables) == "kept\n"


def test_nothing_at_the_address() -> None:
    with held_socket() as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        began = time.monotonic()
        said = join(RAY_ADDRESS=address)
    assert time.monotonic() - began < 40
    assert f"nothing can be reached at RAY_ADDRESS {address}: " in said
    assert "Connection refused" in said


def test_without_its_token(cluster: Cluster) -> None:
    said = join(RAY_ADDRESS=cluster.variables["RAY_ADDRESS"])
    assert "this process is in no cluster" in said
    assert "RAY_AUTH_TOKEN" in said
