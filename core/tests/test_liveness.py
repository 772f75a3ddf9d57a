from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, PeerFailed, PeerLost, TransferAborted
from weightwire.liveness import GAVE_UP, LEFT, Liveness

LABELS = ["trainer rank 0", "worker rank 0", "worker rank 1"]


def start(store: Any, rank: int, peers: set[int], deadline: Deadline, made: dict[int, Liveness]) -> threading.Thread:
    def make() -> None:
        made[rank] = Liveness(store, rank=rank, peers=peers, labels=LABELS, hostname="127.0.0.1", deadline=deadline)

    thread = threading.Thread(target=make)
    thread.start()
    return thread


def connect(*pairs: tuple[int, int]) -> dict[int, Liveness]:
    made: dict[int, Liveness] = {}
    store = HashStore()
    peers: dict[int, set[int]] = {}
    for one, other in pairs:
        peers.setdefault(one, set()).add(other)
        peers.setdefault(other, set()).add(one)
    threads = [start(store, rank, others, Deadline(10), made) for rank, others in peers.items()]
    for thread in threads:
        thread.join()
    return made


def test_everybody_is_there_until_they_leave() -> None:
    made = connect((0, 1), (0, 2))
    made[0].poll()
    assert made[0].failure(1) is None
    made[1].close(LEFT)
    made[2].close(GAVE_UP)
    made[0].poll(1000)
    made[0].poll(1000)
    left, gave_up = made[0].failure(1), made[0].failure(2)
    assert isinstance(left, PeerLost)
    assert str(left) == "[trainer rank 0] worker rank 0 closed its communicator"
    assert isinstance(gave_up, PeerFailed)
    assert str(gave_up) == "[trainer rank 0] worker rank 1 gave up the transfer"
    made[0].close(LEFT)
    made[0].close(LEFT)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_strangers_stall_nobody() -> None:
    before = descriptors()
    store, made = HashStore(), dict[int, Liveness]()
    first = start(store, 0, {1, 2}, Deadline(10), made)
    while not store.check(["liveness/0"]):
        time.sleep(0.001)
    record = json.loads(store.get("liveness/0"))
    address, nonce = tuple(record["address"]), bytes.fromhex(record["nonce"])
    hellos = [
        b"",
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        bytes(20),
        nonce[:7],
        nonce + (7).to_bytes(4, "big"),
        nonce + (0).to_bytes(4, "big"),
        bytes(16) + (1).to_bytes(4, "big"),
    ]
    strangers = [socket.create_connection(address) for _ in hellos]
    for stranger, hello in zip(strangers, hellos, strict=True):
        stranger.sendall(hello)
    others = [start(store, rank, {0}, Deadline(10), made) for rank in (1, 2)]
    for thread in (first, *others):
        thread.join()
    made[0].poll()
    assert made[0].failure(1) is None
    assert made[0].failure(2) is None
    for stranger in strangers:
        stranger.close()
    for liveness in made.values():
        liveness.close(LEFT)
    assert descriptors() == before


def raised_by(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_who_does_not_come_is_named_and_nothing_is_left() -> None:
    before = descriptors()
    error = raised_by(
        lambda: Liveness(HashStore(), rank=1, peers={0, 2}, labels=LABELS, hostname="127.0.0.1", deadline=Deadline(0.1))
    )
    assert isinstance(error, DeadlineExceeded)
    assert str(error) == "[worker rank 0] trainer rank 0, worker rank 1 did not connect within 0.1 s"
    assert descriptors() == before


def test_connecting_can_be_cancelled() -> None:
    deadline = Deadline(30)
    deadline.cancel(TransferAborted("stop"))
    error = raised_by(
        lambda: Liveness(HashStore(), rank=0, peers={1}, labels=LABELS, hostname="127.0.0.1", deadline=deadline)
    )
    assert isinstance(error, TransferAborted)
