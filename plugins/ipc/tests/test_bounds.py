"""What the transport may take, and give back: memory, descriptors, threads, however many rounds and links."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest

from plugins.ipc.tests.fleet import (
    MODES,
    Scene,
    Zoo,
    close,
    holdings,
    model_digests,
    open_trainer,
    send,
    send_often,
    settled,
    zoo,
)
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool import Rank
from weightwire.testing.workers import host_workers
from weightwire_ipc import share

State = dict[str, Any]


def only_send(state: State) -> None:
    state["trainer"].send_weights()


def resident(state: State) -> int:
    """Memory of this process that is its own or shared with other processes."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def peak(state: State) -> int:
    """The most that has been resident since `forget_peak`."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def forget_peak(state: State) -> int:
    """Begin anew to watch the peak; returns what is resident now."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak(state)


def test_a_ring_takes_no_more_memory_than_was_configured(ranks: BorrowRanks) -> None:
    ring, model = 4 << 20, (16, 4 << 20)
    scene = Scene(ranks, "ring", workers=1, arguments=(0.0, *model), trained=(7.0, *model), packed_num_buffers=1)
    # What a process needs once, such as code that it has not run before, is here after the first round.
    scene.trainer.call(only_send)
    scene.trainer.call(close)
    size: State = {"packed_buffer_size_bytes": ring // 4, "packed_num_buffers": 4}
    scene.open(scene.trainer, arguments=(7.0, *model), **size)
    before = scene.trainer.call(forget_peak)
    scene.trainer.call(only_send)
    assert scene.trainer.call(peak) - before < ring + (2 << 20)


def gives_back(rank: Rank, before: Counter[str]) -> None:
    """A process comes to hold no more than before: threads that close connections may still be on their way out."""
    settled(lambda: not rank.call(holdings) - before)


def share_another(state: State) -> None:
    """Share a module that nobody sends."""
    state["another"] = another = Zoo(9, width=20)
    share(another)


def test_workers_are_handed_no_memory_but_what_is_sent(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, "shared", workers=1)
    scene.send()
    before = scene.workers[0].call(holdings)
    scene.trainer.call(share_another)
    scene.send()
    gives_back(scene.workers[0], before)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
def test_two_hundred_rounds_leave_nothing(strict_ranks: BorrowRanks, mode: str) -> None:
    scene = Scene(strict_ranks, mode)
    scene.trainer.call(send_often, 5)
    processes = [scene.trainer, *scene.workers]
    before = [(rank.call(holdings), rank.call(resident)) for rank in processes]
    scene.trainer.call(send_often, 200)
    scene.send()
    for rank, (held, bytes_before) in zip(processes, before, strict=True):
        gives_back(rank, held)
        assert rank.call(resident) < bytes_before + (4 << 20)
    scene.trainer.call(close)


def test_links_that_are_opened_and_closed_leave_nothing(strict_ranks: BorrowRanks) -> None:
    (trainer, worker) = strict_ranks(2)
    client = host_workers([worker], zoo)
    held: list[Any] = []
    for number in range(6):
        trainer.call(open_trainer, client, mode=MODES[number % 3])
        sent = trainer.call(send)
        assert worker.call(model_digests) == sent["digests"]
        trainer.call(close)
        held.append(trainer.call(holdings))
    gives_back(trainer, held[2])
