from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from weightwire import faults
from weightwire.errors import PeerLost
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool import FaultError, RankDied, RankPool, RanksLeaked, held_socket

State = dict[str, Any]


@dataclass(frozen=True)
class Point:
    x: int


def add(state: State, value: int, *, times: int = 1) -> int:
    state["sum"] = state.get("sum", 0) + value * times
    total: int = state["sum"]
    return total


def move(state: State, point: Point) -> Point:
    return Point(point.x + 1)


def double(state: State, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def pid(state: State) -> int:
    return os.getpid()


def torch_threads(state: State) -> int:
    return torch.get_num_threads()


def wait_for_event(state: State) -> str:
    state.setdefault("event", threading.Event()).wait(20)
    return "set"


def set_event(state: State) -> None:
    state.setdefault("event", threading.Event()).set()


def lose(state: State) -> None:
    raise PeerLost("worker rank 1 (pid 5) was lost", transport="nccl", rank="worker rank 1")


class Odd(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raise_odd(state: State) -> None:
    raise Odd(1, 2)


def refuse(state: State) -> None:
    raise ValueError("no")


def visit(state: State, *points: str) -> int:
    for point in points:
        faults.reach(point)
    return len(points)


def leave_thread(state: State) -> None:
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


def leave_descriptor(state: State) -> int:
    return os.dup(0)


def leave_group(state: State) -> None:
    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def test_a_function_of_a_test_module_runs_with_the_state(ranks: BorrowRanks) -> None:
    first, second = ranks(2)
    assert first.call(add, 3) == 3
    assert first.call(add, 4, times=2) == 11
    assert second.call(add, 1) == 1
    assert len({os.getpid(), first.call(pid), second.call(pid)}) == 3
    assert first.pid == first.call(pid)
    assert first.call(torch_threads) == 1


def test_values_of_classes_of_the_test_module_travel(ranks: BorrowRanks) -> None:
    (rank,) = ranks(1)
    assert rank.call(move, Point(1)) == Point(2)
    assert rank.call(double, torch.arange(3)).tolist() == [0, 2, 4]


def test_a_second_call_goes_while_the_first_one_blocks(ranks: BorrowRanks) -> None:
    (rank,) = ranks(1)
    pending = rank.start(wait_for_event)
    assert rank.call(add, 1) == 1
    assert not pending.done()
    assert pending.ended is None
    rank.call(set_event)
    assert pending.result() == "set"
    assert pending.exception() is None
    assert pending.ended is not None


def test_errors_keep_their_type_and_bring_the_traceback(ranks: BorrowRanks) -> None:
    (rank,) = ranks(1)
    with pytest.raises(PeerLost, match=r"\[nccl, worker rank 1\]") as raised:
        rank.call(lose)
    assert "in lose" in str(raised.value.__cause__)
    with pytest.raises(ValueError, match="no"):
        rank.call(refuse)
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        rank.call(raise_odd)


def test_only_functions_at_module_level_are_taken(ranks: BorrowRanks) -> None:
    (rank,) = ranks(1)
    with pytest.raises(ValueError, match="module-level"):
        rank.call(lambda state: None)
    with pytest.raises(ValueError, match="module-level"):
        rank.call([].append)


def test_a_timeout_shows_where_the_rank_is(ranks: BorrowRanks) -> None:
    (rank,) = ranks(1)
    with pytest.raises(TimeoutError, match="in wait_for_event"):
        rank.call(wait_for_event, timeout=0.2)
    rank.call(set_event)


def test_a_killed_rank_says_so_and_is_replaced(pool: RankPool) -> None:
    with pool.ranks(1) as (rank,):
        pending = rank.start(wait_for_event)
        rank.kill()
        assert not rank.alive
        assert rank.exit_code == -signal.SIGKILL
        with pytest.raises(RankDied, match=r"wait_for_event on rank 0 .* exit code -9"):
            pending.result()
        with pytest.raises(RankDied):
            rank.call(pid)
        rank.kill()
    leaks = len(pool.leaks)
    with pool.ranks(1) as (other,):
        assert other.call(pid) != rank.pid
    assert len(pool.leaks) == leaks


def test_a_stopped_rank_goes_on_after_resume(ranks: BorrowRanks) -> None:
    (rank,) = ranks(1)
    rank.stop()
    assert rank.stopped
    assert rank.alive
    pending = rank.start(pid)
    assert not pending.done()
    rank.resume()
    assert pending.result() == rank.pid


def test_a_rank_left_stopped_is_replaced(pool: RankPool) -> None:
    with pool.ranks(1) as (rank,):
        rank.stop()
    assert not rank.alive


def test_points_kill(ranks: BorrowRanks) -> None:
    (rank,) = ranks(1)
    rank.at("worker.vote", "kill")
    pending = rank.start(visit, "worker.begin", "worker.vote")
    rank.reached("worker.vote")
    with pytest.raises(RankDied):
        pending.result()
    assert not rank.alive


def test_points_stop(ranks: BorrowRanks) -> None:
    (rank,) = ranks(1)
    rank.at("worker.vote", "stop")
    pending = rank.start(visit, "worker.vote")
    rank.reached("worker.vote")
    while not rank.stopped:
        time.sleep(0.001)
    assert not pending.done()
    rank.resume()
    assert pending.result() == 1


def test_points_raise_once_after_some_visits(ranks: BorrowRanks) -> None:
    (rank,) = ranks(1)
    rank.at("worker.vote", "raise", after=2)
    assert rank.call(visit, "worker.vote", "worker.vote") == 2
    with pytest.raises(FaultError, match=r"worker\.vote"):
        rank.call(visit, "worker.vote")
    assert rank.call(visit, "worker.vote") == 1


def test_points_hold_until_let_go_again_and_again(ranks: BorrowRanks) -> None:
    (rank,) = ranks(1)
    for _ in range(3):
        rank.at("worker.vote", "hold")
        pending = rank.start(visit, "worker.vote")
        rank.reached("worker.vote")
        assert not pending.done()
        rank.let_go("worker.vote")
        assert pending.result() == 1
    rank.at("worker.vote", "note")
    with pytest.raises(TimeoutError, match="did not reach"):
        rank.reached("worker.vote", timeout=0.05)
    assert rank.call(visit, "worker.vote") == 1
    rank.reached("worker.vote")


def test_reached_tells_a_death_elsewhere(ranks: BorrowRanks) -> None:
    (rank,) = ranks(1)
    rank.at("worker.vote", "note")
    rank.kill()
    with pytest.raises(RankDied, match=r"before it reached worker\.vote"):
        rank.reached("worker.vote")


def test_a_rank_comes_back_disarmed_and_empty(pool: RankPool) -> None:
    # A pool of its own: the session's may have another rank to spare.
    with RankPool() as own:
        check_it_comes_back(own)


def check_it_comes_back(pool: RankPool) -> None:
    with pool.ranks(1) as (rank,):
        rank.call(add, 5)
        rank.at("worker.vote", "kill")
        rank.at("worker.begin", "hold")
        pending = rank.start(visit, "worker.begin")
        rank.reached("worker.begin")
    assert pending.result() == 1
    with pool.ranks(1) as (again,):
        assert again.pid == rank.pid
        assert again.call(visit, "worker.vote", "worker.begin") == 2
        assert again.call(add, 1) == 1


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        (leave_thread, "1 threads more"),
        (leave_descriptor, "open descriptors: /dev/null"),
        (leave_group, "default process group"),
        (wait_for_event, "call wait_for_event is still running"),
    ],
)
def test_what_a_test_leaves_behind_is_told_and_the_rank_replaced(leave: Any, words: str) -> None:
    with RankPool() as pool:
        (rank,) = pool.borrow(1)
        rank.start(leave)
        if leave is not wait_for_event:
            rank.call(pid)
        leaks = pool.give_back([rank], after="test_x")
        assert all(leak.startswith(f"test_x: rank 0 (pid {rank.pid}): ") for leak in leaks)
        assert any(words in leak for leak in leaks)
        assert pool.leaks == leaks
        assert not rank.alive


def test_strict_raises() -> None:
    with RankPool(strict=True) as pool:
        (rank,) = pool.borrow(1)
        rank.call(leave_descriptor)
        with pytest.raises(RanksLeaked, match="/dev/null"):
            pool.give_back([rank])


def test_the_test_process_keeps_no_thread_and_no_descriptor_of_ended_ranks() -> None:
    def counts() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with RankPool() as pool, pool.ranks(1):
        before = counts()
        for _ in range(5):
            with pool.ranks(2) as ranks:
                for rank in ranks:
                    rank.kill()
        end = time.monotonic() + 5
        while counts() > before and time.monotonic() < end:
            time.sleep(0.01)
        assert counts() == before


PARENT = """
import os, sys
from weightwire.testing.pool import RankPool
if __name__ == "__main__":
    pool = RankPool()
    ranks = pool.borrow(2)
    ranks[1].stop()
    print(*[rank.pid for rank in ranks], flush=True)
    os.kill(os.getpid(), 9)
"""


def test_ranks_die_with_their_parent_stopped_ones_too(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    end = time.monotonic() + 5
    while any(_exists(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(_exists(pid) for pid in pids)


def _exists(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_held_socket_keeps_its_port() -> None:
    with held_socket() as held, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(held.getsockname())
        held.listen()
        with socket.create_connection(held.getsockname(), timeout=5):
            pass
