"""Groups leak and reuse: nothing grows, nothing stays, and links can be opened again and again."""

from __future__ import annotations

import gc
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from weightwire.testing.conformance import ranks as remote
from weightwire.testing.conformance.check import Check
from weightwire.testing.conformance.failures import comes_to
from weightwire.testing.conformance.judging import Nonconforming
from weightwire.testing.conformance.payloads import blocks, small
from weightwire.testing.conformance.ranks import State
from weightwire.testing.conformance.source import HALF_SENT
from weightwire.testing.conformance.stage import SECONDS, Scene, Stage, nonconforming
from weightwire.testing.pool_process import Rank
from weightwire.testing.pool_rank import _descriptors, _threads

_ROUNDS = 100
_LINKS = 20
_WARM = 10
_RESIDENT = 24 << 20
"""Bytes by which a process may grow; a model that is kept in every round would be twice that."""
_SHARED_MEMORY = "/dev/shm"
_PATIENCE = 6.0
"""Seconds that what a failure left behind has to end in."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds: counts by kind, and its resident bytes."""

    counts: dict[str, Counter[str]]
    resident: int

    def more_than(self, before: Holdings, foreign: Collection[str] = ()) -> list[str]:
        """What there is more of than `before`, a sentence each; but for threads with names in `foreign`."""
        found = []
        for kind in self.counts:
            was, now = (
                Counter({name: n for name, n in of.counts[kind].items() if name not in foreign})
                for of in (before, self)
            )
            if now.total() > was.total():
                new = ", ".join(f"{count} x {name}" for name, count in sorted((now - was).items())[:5])
                found.append(f"{kind} went from {was.total()} to {now.total()}: {new}")
        if self.resident > before.resident + _RESIDENT:
            found.append(f"resident memory went from {before.resident >> 20} to {self.resident >> 20} MiB")
        return found


def holdings(state: State) -> Holdings:
    """What this process holds now."""
    gc.collect()
    with open("/proc/self/maps") as file:
        mapped = Counter(line.split(None, 5)[5].strip() for line in file if "/dev/shm/" in line or "/memfd:" in line)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    descriptors = Counter(target.partition(":[")[0] for target in _descriptors().values())
    counts = {
        "threads": Counter(name.rpartition("-")[0] or name for name in _threads()),
        "descriptors": descriptors,
        "child processes": Counter(_children()),
        "shared memory": mapped,
    }
    return Holdings(counts, resident)


def _children() -> list[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


def _compare(scene: Scene, before: Sequence[Holdings], what: str, *, patience: float = 2.0) -> None:
    ranks = [*scene.trainers, *scene.workers]
    foreign = scene.stage.subject.foreign_threads
    until = time.monotonic() + patience
    for rank, old in zip(ranks, before, strict=True):
        while (found := rank.call(holdings).more_than(old, foreign)) and time.monotonic() < until:
            time.sleep(0.05)
        if found:
            raise Nonconforming(f"{scene.label(rank)} leaks: {what} its {'; its '.join(found)}")


def _look(scene: Scene) -> list[Holdings]:
    return [rank.call(holdings) for rank in (*scene.trainers, *scene.workers)]


def _flat_over_rounds(stage: Stage) -> None:
    scene = stage.scene(blocks(2), servers=(1, 1))
    (trainer,) = scene.trainers
    with nonconforming("a series of rounds"):
        trainer.call(remote.send_many, 1, _WARM)
        before = _look(scene)
        trainer.call(remote.send_many, 1 + _WARM, _ROUNDS, timeout=2 * SECONDS)
    _compare(scene, before, f"over {_ROUNDS} rounds")
    scene.check_new(scene.workers, _WARM + _ROUNDS)


def _nothing_left_after_shutdown(stage: Stage) -> None:
    scene = stage.scene(small(), servers=(1, 1))
    scene.push(1)
    _leave(scene)
    before = _look(scene)
    scene.open()
    scene.push(2)
    _leave(scene)
    _compare(scene, before, "after shutdown, against before the link was opened,")


def _leave(scene: Scene) -> None:
    scene.close()
    with nonconforming("shutdown of a worker"):
        for rank in scene.workers:
            rank.call(remote.close_worker)


def _flat_over_failures(stage: Stage) -> None:
    scene = stage.scene(blocks(2), servers=(1,))
    (trainer,) = scene.trainers
    with nonconforming("a series of failing rounds"):
        trainer.call(remote.fail_many, 1, 2)
        scene.push(3)
        before = _look(scene)
        trainer.call(remote.fail_many, 4, _WARM)
    scene.push(20)
    _compare(scene, before, f"over {_WARM} failed rounds", patience=_PATIENCE)


def _nothing_left_of_the_killed(stage: Stage) -> None:
    """Whoever is killed in mid-transfer leaves neither processes nor named shared memory behind."""
    named = set(os.listdir(_SHARED_MEMORY))
    scene = stage.scene(blocks(), servers=(1, 1))
    pids = [str(rank.pid) for rank in (*scene.trainers, *scene.workers)]
    # These ranks have served other checks, and what they left then is theirs too.
    named = {name for name in named if not set(re.split("[^0-9A-Za-z]", name)) & set(pids)}
    scene.push(1)
    (trainer,), worker = scene.trainers, scene.workers[1]
    trainer.at(HALF_SENT, "hold")
    scene.send(2)
    comes_to(trainer, HALF_SENT, "the trainer")
    children = [pid for one in _look(scene) for pid in one.counts["child processes"]]
    for rank in (trainer, worker):
        rank.kill()
    scene.check_old(scene.workers[:1], 2, after="after the trainer and worker rank 1 were killed")
    scene.workers[0].kill()
    until = time.monotonic() + _PATIENCE
    while (left := _left(named, children)) and time.monotonic() < until:
        time.sleep(0.05)
    if left:
        raise Nonconforming(f"killed ranks left behind: {', '.join(left)}")


def _left(named: set[str], children: Sequence[str]) -> list[str]:
    processes = [f"process {pid}" for pid in children if os.path.exists(f"/proc/{pid}")]
    return processes + [f"{_SHARED_MEMORY}/{name}" for name in sorted(set(os.listdir(_SHARED_MEMORY)) - named)]


def _many_links(stage: Stage) -> None:
    scene = stage.scene(small(), servers=(1,))
    before: list[Holdings] = []
    for number in range(1, _LINKS + 1):
        scene.push(number)
        if number == _LINKS // 4:
            before = _look(scene)
        if number < _LINKS:
            scene.reopen()
    _compare(scene, before, f"over {_LINKS - _LINKS // 4} links")


def _new_trainers_after_crashes(stage: Stage) -> None:
    scene = stage.scene(small(), servers=(1, 1))
    for version in (1, 3, 5):
        scene.push(version)
        (lost,) = scene.trainers
        lost.at(HALF_SENT, "kill")
        scene.send(version + 1)
        comes_to(lost, HALF_SENT, "the trainer")
        scene.check_old(scene.workers, version + 1, after="after the trainer crashed")
        scene.replace_trainers(stage.lend(1))
    scene.push(7)


def _worker_left_and_comes_back(stage: Stage) -> None:
    """A worker that has left is initialised again by the next round, by itself."""
    scene = stage.scene(small(), servers=(1, 1))
    scene.push(1)
    for rank in scene.workers:
        rank.call(remote.close_worker)
    report = scene.push(2)
    if not report["reinitialised"]:
        raise Nonconforming("the report of a round that opened its link again does not say so")
    scene.push(3)


def _worker_restarted(stage: Stage) -> None:
    """A server whose process was replaced is found by a new link."""
    scene = stage.scene(small(), servers=(1, 1))
    scene.push(1)
    lost: Rank = scene.workers[1]
    lost.kill()
    scene.replace_worker(1)
    scene.reopen()
    scene.push(2)


CHECKS: Final = (
    Check("leak", "flat-over-100-rounds", _flat_over_rounds),
    Check("leak", "flat-over-failed-rounds", _flat_over_failures),
    Check("leak", "nothing-left-after-shutdown", _nothing_left_after_shutdown),
    Check("leak", "nothing-left-of-the-killed", _nothing_left_of_the_killed),
    Check("reuse", "twenty-links", _many_links),
    Check("reuse", "new-trainers-after-crashes", _new_trainers_after_crashes),
    Check("reuse", "worker-left-and-comes-back", _worker_left_and_comes_back),
    Check("reuse", "worker-restarted", _worker_restarted),
)
