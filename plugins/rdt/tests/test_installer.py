"""The thread that installs what arrived."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, TransferAborted
from weightwire_rdt import installer as module
from weightwire_rdt.installer import Installer

SECONDS = 20.0
_earlier: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads of other tests' installers."""


class Holdable:
    """Work that waits until it is let go."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()
        self.ended = False

    def __call__(self) -> None:
        self.began.set()
        assert self.go.wait(SECONDS)
        self.ended = True


@pytest.fixture
def installer() -> Iterator[Installer]:
    made = Installer()
    yield made
    made.drop()
    assert len(threads()) <= 1


@pytest.fixture(autouse=True)
def short_lived(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that have nothing to do end soon, so that none is left behind a test."""
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.01)
    _earlier.update(threads())
    yield
    for thread in threads():
        thread.join(SECONDS)
        assert not thread.is_alive()


def threads() -> list[threading.Thread]:
    mine = [thread for thread in threading.enumerate() if thread.name == "weightwire-rdt-install"]
    return [thread for thread in mine if thread not in _earlier]


def deadline() -> Deadline:
    return Deadline(SECONDS)


def test_one_thing_after_the_other(installer: Installer) -> None:
    found: list[tuple[int, int]] = []
    for number in range(50):
        installer.submit(lambda number=number: found.append((number, threading.get_ident())))  # type: ignore[misc]
    installer.drain(deadline())
    assert [number for number, _ in found] == list(range(50))
    assert {thread for _, thread in found} - {threading.get_ident()} == {thread for _, thread in found}


def test_it_works_while_the_caller_goes_on(installer: Installer) -> None:
    first, second = Holdable(), Holdable()
    installer.submit(first)
    assert first.began.wait(SECONDS)
    installer.submit(second)
    assert not second.began.is_set()
    first.go.set()
    second.go.set()
    installer.drain(deadline())
    assert first.ended
    assert second.ended


def test_draining_nothing_ends_at_once(installer: Installer) -> None:
    installer.drain(Deadline(0.001))
    installer.begin()
    installer.drain(Deadline(0.001))


def test_an_error_is_raised_by_drain_and_nothing_is_done_after_it(installer: Installer) -> None:
    found: list[int] = []
    installer.submit(lambda: found.append(1))
    installer.submit(lambda: found.append(1 // 0))
    installer.submit(lambda: found.append(3))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            installer.drain(deadline())
    installer.submit(lambda: found.append(4))
    with pytest.raises(ZeroDivisionError):
        installer.drain(deadline())
    assert found == [1]


def test_the_first_of_two_errors(installer: Installer) -> None:
    def fail(words: str) -> None:
        raise RuntimeError(words)

    installer.submit(lambda: fail("first"))
    installer.submit(lambda: fail("second"))
    with pytest.raises(RuntimeError, match="first"):
        installer.drain(deadline())


def test_the_next_round_begins_anew(installer: Installer) -> None:
    found: list[int] = []
    for number in range(3):
        installer.begin()
        installer.submit(lambda number=number: found.append(number))  # type: ignore[misc]
        installer.submit(lambda: found.append(1 // 0))
        with pytest.raises(ZeroDivisionError):
            installer.drain(deadline())
    installer.begin()
    installer.submit(lambda: found.append(9))
    installer.drain(deadline())
    assert found == [0, 1, 2, 9]


def test_what_drains_ends_with_its_deadline(installer: Installer) -> None:
    stuck = Holdable()
    installer.submit(stuck)
    with pytest.raises(DeadlineExceeded, match="what arrived to be installed"):
        installer.drain(Deadline(0.02))
    cancelled = deadline()
    cancelled.cancel(TransferAborted("no more"))
    with pytest.raises(TransferAborted, match="no more"):
        installer.drain(cancelled)
    stuck.go.set()
    installer.drain(deadline())
    assert stuck.ended


def test_what_waits_is_dropped_and_what_runs_is_waited_for(installer: Installer) -> None:
    running, waiting = Holdable(), Holdable()
    installer.submit(running)
    installer.submit(waiting)
    assert running.began.wait(SECONDS)
    dropped = threading.Event()

    def drop() -> None:
        installer.drop()
        assert running.ended
        dropped.set()

    thread = threading.Thread(target=drop)
    thread.start()
    assert not dropped.wait(0.05)
    running.go.set()
    thread.join(SECONDS)
    assert dropped.is_set()
    assert not waiting.began.is_set()
    later = Holdable()
    installer.submit(later)
    installer.drop()
    assert not later.began.is_set()
    installer.begin()
    later.go.set()
    installer.submit(later)
    installer.drain(deadline())
    assert later.ended


def test_the_thread_ends_and_comes_back(installer: Installer) -> None:
    for _ in range(3):
        done = threading.Event()
        installer.submit(done.set)
        installer.drain(deadline())
        assert done.is_set()
        for thread in threads():
            thread.join(SECONDS)
        assert not threads()


def test_what_was_installed_is_let_go(installer: Installer) -> None:
    """Its tensors must not live until the next round."""

    class Buffer:
        pass

    buffer = Buffer()
    seen = weakref.ref(buffer)
    installer.submit(lambda buffer=buffer: None)  # type: ignore[misc]
    del buffer
    installer.drain(deadline())
    assert seen() is None


def test_a_process_ends_while_something_is_installed() -> None:
    script = """
import threading
from weightwire_rdt.installer import Installer
began = threading.Event()
def work():
    began.set()
    threading.Event().wait(60)
Installer().submit(work)
began.wait(20)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
