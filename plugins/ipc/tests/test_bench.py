from __future__ import annotations

import ctypes
import dataclasses
import errno
import os

import pytest

from weightwire.testing.measure import Case, Options, Seat, equal_tensors, model_like, run_bench
from weightwire.testing.payload import huge_buffer
from weightwire.testing.pool import RankPool
from weightwire_ipc import bench
from weightwire_ipc.memory import MemoryFile
from weightwire_ipc.process_memory import copy_from, refusal

MIB = 1 << 20
OPTIONS = Options(nbytes=MIB, tensors=26, rounds=1, memory=False)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {case.name: case for case in bench.cases(OPTIONS)}


@pytest.mark.thorough
def test_a_private_source_beside_the_other_ways(cases: dict[str, Case], pool: RankPool) -> None:
    report = run_bench("ipc", [cases["private"]], OPTIONS, pool=pool)
    assert report.bit_equal
    assert report.ratios.keys() == {"ipc.private.memcpy", "ipc.private.memcpy_by_tensor", "ipc.private.others"}
    run = report.runs[0]
    assert "0 parameters read in place, 26 through a ring" in run.extras["path"]
    others = {"copy_in_copy_out", "fresh_segments", "torch_sharing", "process_vm_readv", "nixl"}
    skipped = {name for name in others if str(run.extras.get(name)).startswith("skipped: ")}
    assert {one.name for one in report.runs} == {"ipc", "memcpy", "memcpy_by_tensor", *others} - skipped
    assert skipped <= {"process_vm_readv", "nixl"}


def test_adopted_memory_of_two_workers_is_weighed_together(cases: dict[str, Case], pool: RankPool) -> None:
    report = run_bench("ipc", [cases["adopt_1to2"]], OPTIONS, pool=pool)
    assert report.bit_equal
    assert report.ratios.keys() == {"ipc.adopt_1to2.memcpy", "ipc.adopt_1to2.memcpy_by_tensor"}
    extras = report.runs[0].extras
    assert extras["path"] == "shared memory, one copy for all that adopt it"
    # The sender and both workers have one export mapped; the workers' part of that is two thirds.
    assert 0.6 * MIB < extras["workers_shared_bytes"] < 1.5 * MIB
    both = extras["workers_private_bytes"] + extras["workers_shared_bytes"]
    assert extras["workers_copies"] == pytest.approx(both / model_like(MIB, tensors=26).nbytes)


@pytest.mark.thorough
def test_one_worker_beside_two_and_a_module_of_its_own(cases: dict[str, Case], pool: RankPool) -> None:
    tiny = dataclasses.replace(cases["tiny"], payload=equal_tensors(40, 1024))
    report = run_bench("ipc", [cases["1to2"], tiny], OPTIONS, pool=pool)
    assert report.bit_equal
    assert report.ratios.keys() >= {"ipc.1to2.1to1", "ipc.tiny.one"}
    paths = {f"{run.case} {run.name}": run.extras.get("path") for run in report.runs}
    assert paths["1to2 ipc"] == paths["1to2 one_worker"]
    assert "26 parameters read in place, 0 through a ring" in str(paths["1to2 ipc"])
    assert "40 parameters read in place" in str(paths["tiny ipc"])
    assert "1 parameters read in place" in str(paths["tiny one_tensor"])


def test_all_cases_have_the_ratios_that_are_reported(cases: dict[str, Case]) -> None:
    assert list(cases) == ["shared", "private", "adopt_1to2", "adopt_private_1to2", "1to2", "tiny"]
    assert all("memcpy" in case.references for case in cases.values() if case.name != "tiny")
    assert cases["tiny"].payload == equal_tensors(20_000, 1024)


def test_memory_of_a_process_is_what_it_has_alone_and_its_part_of_the_rest() -> None:
    before = bench.Memory.of(os.getpid())
    alone, file = huge_buffer(16 * MIB), MemoryFile(8 * MIB, what="a test")
    file.memory.fill_(1)
    now = bench.Memory.of(os.getpid())
    assert 15 * MIB < now.private - before.private < 24 * MIB
    assert now.shared - before.shared == 8 * MIB
    assert alone.numel() == 16 * MIB
    file.close()


def test_memory_of_a_process_is_read_or_the_reason_told() -> None:
    reason = refusal()
    assert reason is None or "ptrace_scope" in reason
    source, target = ctypes.create_string_buffer(b"weights"), ctypes.create_string_buffer(7)
    copy_from(os.getpid(), ctypes.addressof(source), ctypes.addressof(target), 7)
    assert target.raw == b"weights"
    with pytest.raises(OSError, match="process_vm_readv") as caught:
        copy_from(os.getpid(), 8, ctypes.addressof(target), 7)
    assert caught.value.errno == errno.EFAULT


def test_a_way_for_fewer_receivers_leaves_the_others_alone() -> None:
    way = bench.IPCWay(receivers=1)
    seat = Seat(rank=2, world=3, payload=equal_tensors(1, 64), directory="")
    assert way.offer(seat) is None
    assert way.held(seat) == way.digests(seat) == []
    assert way.step(seat) is None
