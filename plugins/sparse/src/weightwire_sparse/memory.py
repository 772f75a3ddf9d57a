"""Memory for what was found, used again: to touch new memory takes longer than to compare as much."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from weightwire.staging import allocate, storage_bytes
from weightwire_sparse.changes import Bytes, Changes
from weightwire_sparse.pieces import Integers
from weightwire_sparse.threads import Threads

_CHUNK = 4 << 20
_ALIGNMENT = 16
_LEAST = 1 << 20


def new_memory(nbytes: int) -> Bytes:
    """Memory with undefined content, on huge pages if it is large.

    Raises:
        MemoryError: There is not enough.
    """
    return storage_bytes(allocate(nbytes, torch.device("cpu"))).numpy()


class Pool:
    """Memory that is given out again once no array refers to it any more; used by several threads at once."""

    def __init__(self) -> None:
        self._held: list[Bytes] = []
        self._lock = threading.Lock()

    def room(self, nbytes: int) -> Bytes:
        """Memory with undefined content, aligned for every dtype.

        Raises:
            MemoryError: There is not enough.
        """
        if nbytes < _LEAST:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            fitting = [place for place in self._free() if nbytes <= len(self._held[place]) <= 2 * nbytes]
            if not fitting:
                # A bit more, since the next round seldom needs exactly as much.
                self._held.append(new_memory(nbytes + nbytes // 8))
                fitting = [len(self._held) - 1]
            best = min(fitting, key=lambda place: len(self._held[place]))
            return self._held[best][:nbytes]

    def trim(self, nbytes: int) -> None:
        """Give back to the system what is not used and exceeds `nbytes` in all."""
        with self._lock:
            for place in reversed(self._free()):
                nbytes -= len(self._held[place])
                if nbytes < 0:
                    del self._held[place]

    def _free(self) -> list[int]:
        return [place for place in range(len(self._held)) if sys.getrefcount(self._held[place]) == _UNUSED]


_UNUSED = sys.getrefcount([object()][0]) + 1
"""What an object counts that only a list refers to: as here, where the list is gone already, and by that list."""


class Recorder:
    """Keeps what is found from one mark to the next, as long as there is room for it; used by several threads at once.

    Args:
        limit: Bytes of addresses and values at most. More is not kept, and the next delta cannot be had.
        pool: Gives the memory.

    Attributes:
        overflowed: Whether there was more.
        nbytes: Bytes of all.
        pool: See above.
    """

    def __init__(self, limit: int, pool: Pool) -> None:
        self.overflowed = False
        self.nbytes = 0
        self._limit, self.pool = limit, pool
        self._lock = threading.Lock()
        self._chunk: Bytes = np.empty(0, np.uint8)
        self._used = 0

    def noted(self, changes: Changes) -> Changes | None:
        """`changes` themselves; None where there is no room for them."""
        with self._lock:
            return changes if self._fit(changes.addresses.nbytes + changes.values.nbytes) else None

    def kept(self, changes: Changes) -> Changes | None:
        """A copy of `changes`; None where there is no room for it."""
        size = changes.addresses.nbytes
        memory = self._reserved(size + changes.values.nbytes)
        if memory is None:
            return None
        addresses, values = memory[:size].view(np.int64), memory[size : size + changes.values.nbytes]
        addresses[:], values[:] = changes.addresses, changes.values
        return Changes(addresses, values)

    def _reserved(self, nbytes: int) -> Bytes | None:
        with self._lock:
            if not self._fit(nbytes):
                return None
            if self._used + nbytes > len(self._chunk):
                self._chunk, self._used = self.pool.room(max(_CHUNK, nbytes)), 0
            start = self._used
            self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            return self._chunk[start:]

    def _fit(self, nbytes: int) -> bool:
        self.nbytes += nbytes
        self.overflowed |= self.nbytes > self._limit
        return not self.overflowed


def joined(found: Sequence[Changes], pool: Pool, threads: Threads | None = None) -> Changes:
    """Findings in ranges of addresses that do not overlap, none of them empty, as one and in memory of its own.

    Args:
        found: The findings.
        pool: Gives the memory.
        threads: One of them copies half of it, if there are any.
    """
    ordered = sorted(found, key=lambda changes: int(changes.addresses[0]))
    addresses = pool.room(sum(changes.addresses.nbytes for changes in ordered)).view(np.int64)
    values = pool.room(sum(changes.values.nbytes for changes in ordered))
    middle = len(ordered) // 2
    place = sum(len(changes.addresses) for changes in ordered[:middle])
    offset = sum(len(changes.values) for changes in ordered[:middle])
    second = partial(_concatenate, ordered[middle:], addresses[place:], values[offset:])
    copying = second if threads is None else threads.submit(second).result
    _concatenate(ordered[:middle], addresses[:place], values[:offset])
    copying()
    return Changes(addresses, values)


def _concatenate(found: Sequence[Changes], addresses: Integers, values: Bytes) -> None:
    if found:
        np.concatenate([changes.addresses for changes in found], out=addresses)
        np.concatenate([changes.values for changes in found], out=values)
