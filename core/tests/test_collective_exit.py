from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from core.tests import exiting, stuck_constructor
from core.tests.collective_ranks import State, connect, receive_zeros
from weightwire.testing.fixtures import BorrowRanks


def connect_twice(state: State, first: str, second: str) -> None:
    connect(state, 1, 2, first, 90.0, piece_bytes=exiting.PIECE)
    retired = state["communicator"]
    connect(state, 1, 2, second, 90.0, piece_bytes=exiting.PIECE)
    state["communicator"], state["forgotten"] = retired, state["communicator"]


@pytest.mark.thorough
@pytest.mark.timeout(180)  # a process of its own imports torch
def test_a_process_ends_by_itself_with_its_own_code(ranks: BorrowRanks, tmp_path: Path) -> None:
    (peer,) = ranks(1)
    peer.at("communicator.first_piece", "stop")
    stores = [str(tmp_path / "first"), str(tmp_path / "second")]
    command = [sys.executable, exiting.__file__, *stores]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        peer.call(connect_twice, *stores, timeout=90)
        peer.start(receive_zeros, exiting.SIZE, 0)
        assert process.stdout is not None
        assert process.stdout.readline() == "leaving\n"
        # A peer's death wakes whatever still waits for it, now that no thread may come back to Python.
        peer.kill()
        left = time.monotonic()
        _, errors = process.communicate(timeout=10)
        assert time.monotonic() - left < 5.0
    assert (process.returncode, errors) == (exiting.EXIT_CODE, "")


def given_up(state: State) -> float:
    return stuck_constructor.give_up()


def constructing(state: State) -> bool:
    return any(thread.name == "weightwire-construct" for thread in threading.enumerate())


def test_a_constructor_that_waits_for_a_peer_is_left_at_once(ranks: BorrowRanks) -> None:
    (rank,) = ranks(1)
    assert rank.call(given_up) < 10 * stuck_constructor.WATCHED_SECONDS
    assert rank.call(constructing)  # gloo itself is still waiting
    rank.call(constructed)


def constructed(state: State) -> None:
    until = time.monotonic() + 20
    while constructing(state):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.thorough
@pytest.mark.timeout(180)  # a process of its own imports torch
def test_a_process_that_left_a_constructor_ends_with_its_own_code() -> None:
    command = [sys.executable, "-m", stuck_constructor.__name__]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == stuck_constructor.EXIT_CODE, ended.stderr
