"""Memory files: sealed, mapped privately, and refused where they are something else."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from plugins.ipc.tests.fleet import State
from plugins.ipc.tests.namespaces import CLONE_NEWNS, leave_namespace, require_unshare
from weightwire.errors import HandshakeError, TransferError
from weightwire.testing.fixtures import BorrowRanks
from weightwire_ipc.memory import PAGE, Mapping, MemoryFile, available_bytes

_SEAL, _SHRINK, _GROW, _WRITE, _FUTURE_WRITE = 1, 2, 4, 8, 16
_FIXED_SIZE = _SEAL | _SHRINK | _GROW


def memory_file(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def regular_file(path: Path) -> int:
    file = path / "weights"
    file.write_bytes(bytes(PAGE))
    return os.open(file, os.O_RDWR)


def only_for_writing(path: Path) -> int:
    fd = memory_file(PAGE, _FIXED_SIZE | _FUTURE_WRITE)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    finally:
        os.close(fd)


def pipe(path: Path) -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


HOSTILE: dict[str, tuple[Callable[[Path], int], str]] = {
    "pipe": (pipe, "it is no memory file"),
    "directory": (lambda path: os.open(path, os.O_RDONLY), "it is no memory file"),
    "path only": (lambda path: os.open(regular(path), os.O_PATH), "it is no memory file"),
    "regular file": (regular_file, "it is no memory file|it is not sealed"),
    "eventfd": (lambda path: os.eventfd(0), "it is no memory file"),
    "unsealed": (lambda path: memory_file(PAGE, 0), "it is not sealed"),
    "sealed against resizing": (lambda path: memory_file(PAGE, _FIXED_SIZE), "it is not sealed"),
    "sealed against writing": (lambda path: memory_file(PAGE, _WRITE), "it is not sealed"),
    "not sealed against more seals": (lambda path: memory_file(PAGE, _SHRINK | _GROW | _WRITE), "it is not sealed"),
    "sealed and too small": (lambda path: memory_file(PAGE // 2, _FIXED_SIZE | _WRITE), f"has {PAGE // 2} bytes"),
    "only for writing": (only_for_writing, "it cannot be mapped"),
}


def regular(path: Path) -> Path:
    file = path / "only-a-path"
    file.write_bytes(bytes(PAGE))
    return file


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_sealed_memory_file_is_refused_and_closed(kind: str, tmp_path: Path) -> None:
    make, words = HOSTILE[kind]
    fd = make(tmp_path)
    with pytest.raises(HandshakeError, match=f"segment 3 is refused: .*({words})"):
        Mapping(fd, PAGE, what="segment 3")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("announced", [PAGE - 1, PAGE + 1, 2 * PAGE, 1 << 47])
def test_another_size_than_announced_is_refused(announced: int) -> None:
    file = MemoryFile(PAGE, what="weights")
    with pytest.raises(HandshakeError, match=f"{PAGE} bytes and was announced with {announced}"):
        Mapping(os.dup(file.fd), announced, what="it")


def test_a_file_that_no_address_space_holds_is_refused() -> None:
    with pytest.raises(HandshakeError, match="it cannot be mapped"):
        Mapping(memory_file(1 << 47, _FIXED_SIZE | _WRITE), 1 << 47, what="it")


def test_nobody_who_holds_the_descriptor_resizes_or_writes() -> None:
    file = MemoryFile(3 * PAGE, what="weights")
    file.memory.fill_(7)
    again = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR)
    attempts: list[Callable[[int], object]] = [
        lambda fd: os.ftruncate(fd, PAGE),
        lambda fd: os.ftruncate(fd, 4 * PAGE),
        lambda fd: os.posix_fallocate(fd, 0, 4 * PAGE),
        lambda fd: mmap.mmap(fd, 3 * PAGE),
        lambda fd: os.pwrite(fd, b"x", 0),
        lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _WRITE),
    ]
    for fd in (file.fd, again):
        for attempt in attempts:
            with pytest.raises(OSError):
                attempt(fd)
        assert not becomes_writable(fd, 3 * PAGE)
    os.close(again)
    assert file.memory.eq(7).all()


def becomes_writable(fd: int, nbytes: int) -> bool:
    """Whether a shared mapping for reading can be made one for writing afterwards."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(nbytes), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    assert address not in (None, ctypes.c_void_p(-1).value)
    writable: bool = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 3) == 0
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    return writable


def test_a_stray_write_stays_where_it_is_and_is_found_and_undone() -> None:
    file = MemoryFile(5 * PAGE + 17, what="weights")
    file.memory.fill_(1)
    mine, other = (Mapping(os.dup(file.fd), file.nbytes, what="it") for _ in range(2))
    window, beside = mine.window(), other.window()
    assert (mine.strays(), other.strays()) == ([], [])
    window[2 * PAGE + 5] = 9
    window[-1] = 9
    assert mine.strays() == [2, 5]
    assert (other.strays(), mine.differences(2)) == ([], [2 * PAGE + 5])
    assert mine.differences(5) == [5 * PAGE + 16]
    assert file.memory.eq(1).all()
    assert beside.eq(1).all()
    # What was written no longer follows the file; the rest does.
    file.memory.fill_(3)
    assert beside.eq(3).all()
    assert window[: 2 * PAGE].eq(3).all()
    assert window[2 * PAGE].item() == 1
    mine.renew()
    assert mine.strays() == []
    assert mine.window().eq(3).all()
    assert window[2 * PAGE + 5].item() == 9


def test_a_window_tells_when_its_last_view_is_gone() -> None:
    file = MemoryFile(PAGE, what="weights")
    mapping = Mapping(os.dup(file.fd), PAGE, what="it")
    closed: list[int] = []
    window = mapping.window(lambda: closed.append(1))
    mapping.window()
    view = window[64:128].view(torch.float32)
    del window
    parameter = nn.Parameter(torch.zeros(16))
    parameter.data = view
    del view
    storage = parameter.untyped_storage()
    parameter.data = torch.zeros(16)
    assert not closed
    del storage
    assert closed == [1]


def test_a_window_that_an_exception_passes_through_is_let_go_of() -> None:
    file = MemoryFile(PAGE, what="weights")
    mapping = Mapping(os.dup(file.fd), PAGE, what="it")
    closed: list[int] = []

    def use() -> None:
        window = mapping.window(lambda: closed.append(1))
        window[3:].view(torch.int64)

    with pytest.raises(RuntimeError, match="divisible"):
        use()
    assert closed == [1]


def test_the_memory_outlives_descriptors_and_goes_with_the_last_view() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("/memfd:weightwire" in line for line in maps)

    before = mapped()
    file = MemoryFile(PAGE, what="weights")
    mapping = Mapping(os.dup(file.fd), PAGE, what="it")
    view, memory = mapping.window()[:8], file.memory
    memory.fill_(4)
    file.close()
    file.close()
    del file, mapping
    assert mapped() == before + 2
    assert view.eq(4).all()
    del view, memory
    assert mapped() == before


def test_an_empty_file() -> None:
    file = MemoryFile(0, what="nothing")
    mapping = Mapping(os.dup(file.fd), 0, what="it")
    assert (len(file.memory), len(mapping.window()), mapping.strays()) == (0, 0, [])


def under_a_limit(state: State) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        MemoryFile(1 << 20, what="a small one")
        MemoryFile(3 << 20, what="the ring")
    except TransferError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "it was made"


def test_a_limit_on_files_is_named_with_the_size_and_what_to_do(strict_ranks: BorrowRanks) -> None:
    (rank,) = strict_ranks(1)
    said = rank.call(under_a_limit)
    assert "no memory for the ring of 3145728 bytes" in said
    assert "ulimit -f" in said


def test_more_than_there_is_is_refused_before_anything_is_allocated() -> None:
    before = os.listdir("/proc/self/fd")
    room = available_bytes()
    assert room is not None
    with pytest.raises(TransferError, match=rf"no memory for the model: it takes {1 << 50} bytes .*\d+ are available"):
        MemoryFile(1 << 50, what="the model")
    assert os.listdir("/proc/self/fd") == before


def in_a_control_group(state: State) -> list[int | None]:
    """Mounts what a group of version 2 shows, where this thread alone sees it."""
    leave_namespace(CLONE_NEWNS)
    root = Path("/sys/fs/cgroup")
    subprocess.run(["mount", "-t", "tmpfs", "none", str(root)], check=True)
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = root / next(line for line in lines if line.startswith("0::")).removeprefix("0::/")
    own.mkdir(parents=True, exist_ok=True)
    (own / "memory.max").write_text("max\n")
    (root / "memory.max").write_text("1073741824\n")
    (root / "memory.current").write_text("943718400\n")
    (root / "memory.stat").write_text("anon 1\nfile 524288000\nshmem 104857600\n")
    limited = available_bytes()
    (root / "memory.max").write_text("max\n")
    return [limited, available_bytes()]


def test_the_limit_of_a_control_group_counts_and_the_cache_in_it_does_not(strict_ranks: BorrowRanks) -> None:
    if not any(line.startswith("0::") for line in Path("/proc/self/cgroup").read_text().splitlines()):
        pytest.skip("this system has no control groups of version 2")
    require_unshare("-m")
    (rank,) = strict_ranks(1)
    limited, free = rank.call(in_a_control_group)
    assert limited == 1073741824 - 943718400 + 524288000 - 104857600
    assert free is not None and free > limited
