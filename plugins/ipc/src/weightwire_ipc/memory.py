"""Memory files: anonymous shared memory that is handed over as a descriptor and vanishes with its last holder.

A file is sealed once its maker has mapped it: nobody can resize it, so a reader never meets SIGBUS, and nobody can map
it for writing any more, so nobody but its maker ever writes it. Readers map it privately, copy on write: a stray write
of theirs neither kills them nor reaches anybody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from weightwire.errors import HandshakeError, TransferError

PAGE = mmap.PAGESIZE

_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW, _WRITE, _FUTURE_WRITE = 1, 2, 4, 8, 16
_POPULATE_READ = 22
_FIXED_SIZE = _SEAL | _SHRINK | _GROW
_PRESENT_OR_SWAPPED, _OF_A_FILE = 0b110, 0b001  # bits 63 to 61 of an entry of /proc/self/pagemap


class MemoryFile:
    """A memory file of this process, which alone writes it.

    Args:
        nbytes: Its size.
        what: What it is for, in words for messages.

    Attributes:
        fd: Descriptor, to be handed over.
        mapping: The file as mapped here.
        memory: The whole file, 1-D uint8. It stays mapped while a tensor over it lives, whatever becomes of `fd`.

    Raises:
        TransferError: There is no memory left for it.
    """

    def __init__(self, nbytes: int, *, what: str) -> None:
        self.nbytes = nbytes
        size = max(1, nbytes)
        room = available_bytes()
        if room is not None and size > room:
            raise TransferError(f"no memory for {what}: it takes {size} bytes of shared memory, {room} are available")
        self.fd = os.memfd_create("weightwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        try:
            os.ftruncate(self.fd, size)
            os.posix_fallocate(self.fd, 0, size)  # a lack of memory shows here, and not as SIGBUS at the first write
            mapping = mmap.mmap(self.fd, size)
        except OSError as error:
            self._close()
            hint = "; raise `ulimit -f`" if error.errno == errno.EFBIG else ""
            raise TransferError(f"no memory for {what} of {size} bytes: {error.strerror}{hint}") from error
        fcntl.fcntl(self.fd, _ADD_SEALS, _FIXED_SIZE | _FUTURE_WRITE)
        self.mapping = mapping
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes]

    def hand_over(self, pid: int) -> tuple[dict[str, Any], list[int]]:
        """What to tell the worker of process `pid` of it, and the descriptor to go with that."""
        return {"memory": self.nbytes}, [self.fd]

    def close(self) -> None:
        """Give up the descriptor; idempotent. Readers keep what they have mapped."""
        self._close()


class Mapping:
    """Another process's memory file, mapped privately: reading sees what its maker writes, writing stays here.

    Args:
        fd: Descriptor that was handed over; owned from now on.
        nbytes: The size that was announced.
        what: What it is, in words for messages.

    Attributes:
        lent: Whether others than this transport have been shown it, who may write.
        reported: Pages of `strays` that have been told of.

    Raises:
        HandshakeError: It is no sealed memory file of that size.
    """

    def __init__(self, fd: int, nbytes: int, *, what: str) -> None:
        self.nbytes = nbytes
        self.lent = False
        self.reported: set[int] = set()
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        problem = _unsafe(fd, max(1, nbytes))
        if problem:
            self._close()
            raise HandshakeError(f"{what} is refused: {problem}")
        try:
            self._mapped = self._map()
        except OSError as error:
            self._close()
            raise HandshakeError(f"{what} is refused: it cannot be mapped ({error.strerror})") from error
        self._windows = [0]

    @property
    def in_use(self) -> bool:
        """Whether a window that was given out, or a view of it, is still alive."""
        return self._windows[0] > 0

    def _map(self) -> mmap.mmap:
        flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(self._fd, max(1, self.nbytes), flags=flags, prot=access)
        with contextlib.suppress(OSError):  # before Linux 5.14; pages then come as they are read
            mapped.madvise(_POPULATE_READ)
        return mapped

    def window(self, closed: Callable[[], object] = bool) -> torch.Tensor:
        """The file as a 1-D uint8 tensor; `closed` is called once it and every view of it are gone."""
        return torch.frombuffer(self._view(closed), dtype=torch.uint8)[: self.nbytes]

    def pieces(self, offsets: Sequence[int], sizes: Sequence[int], closed: Callable[[], object]) -> list[torch.Tensor]:
        """Parts of the file, each 1-D uint8 and to torch a storage of its own.

        Args:
            offsets: Where each begins.
            sizes: Its bytes.
            closed: Called once all of them, and every view of them, are gone.
        """
        view = self._view(closed)
        empty = torch.empty(0, dtype=torch.uint8)
        return [
            torch.frombuffer(view, dtype=torch.uint8, offset=offset, count=nbytes) if nbytes else empty
            for offset, nbytes in zip(offsets, sizes, strict=True)
        ]

    def _view(self, closed: Callable[[], object]) -> memoryview:
        view = memoryview(self._mapped)
        self._windows[0] += 1
        weakref.finalize(view, _close_window, self._windows, closed).atexit = False
        return view

    def strays(self) -> list[int] | None:
        """Pages that this process has written, which do not follow the file any more; None if the system won't say."""
        count = -(-max(1, self.nbytes) // PAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped)) // PAGE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                entries = bytearray(os.pread(file.fileno(), 8 * count, 8 * first))
        except OSError:
            return None
        if len(entries) < 8 * count:
            return None
        kinds = (torch.frombuffer(entries, dtype=torch.int64) >> 61) & 0b111
        own = ((kinds & _PRESENT_OR_SWAPPED) != 0) & ((kinds & _OF_A_FILE) == 0)
        written: list[int] = own.nonzero().flatten().tolist()
        return written

    def differences(self, page: int) -> list[int]:
        """Bytes of one page, by their places in the file, that are other here than in the file."""
        here, there = self._mapped[page * PAGE : (page + 1) * PAGE], os.pread(self._fd, PAGE, page * PAGE)
        return [page * PAGE + at for at, (one, other) in enumerate(zip(here, there, strict=True)) if one != other]

    def renew(self) -> None:
        """Map the file anew, which undoes what was written here; windows given out keep the old mapping."""
        self._mapped = self._map()
        self.reported.clear()


def _close_window(windows: list[int], closed: Callable[[], object]) -> None:
    windows[0] -= 1
    closed()


def _unsafe(fd: int, nbytes: int) -> str | None:
    """Why a descriptor cannot be mapped safely."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return "it is no memory file"
    if status.st_size != nbytes:
        return f"it has {status.st_size} bytes and was announced with {nbytes}"
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError:
        return "it is no memory file"
    if seals & _FIXED_SIZE != _FIXED_SIZE or not seals & (_WRITE | _FUTURE_WRITE):
        return "it is not sealed against resizing and writing"
    return None


def available_bytes() -> int | None:
    """Memory that this process may still take, as far as the system and its control groups say."""
    room = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        room.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line for line in lines if line.startswith("0::")).removeprefix("0::").lstrip("/")
        for group in [Path("/sys/fs/cgroup", own), *Path("/sys/fs/cgroup", own).parents][:-3]:
            with contextlib.suppress(OSError, ValueError):  # a group without a limit says "max"
                limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
                kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                cache = int(kinds.get("file", 0)) - int(kinds.get("shmem", 0))  # goes when memory is asked for
                room.append(max(0, limit - used + cache))
    return min(room, default=None)
