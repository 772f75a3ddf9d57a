"""Where something changed, from one mark to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire_sparse.changes import Bytes, Changes
from weightwire_sparse.finding import empty
from weightwire_sparse.memory import Pool, joined
from weightwire_sparse.pieces import Integers
from weightwire_sparse.threads import Threads

_BLOCK = 1 << 16


@dataclass(slots=True, eq=False)
class _Entry:
    """What was found between the mark before and `mark`: as it was found, until it is made small, then gaps alone.

    Attributes:
        mark: See above.
        first: The first address; 0 if there is none.
        gaps: From each address to the next.
    """

    mark: int
    found: list[Changes] | None
    first: int = 0
    gaps: npt.NDArray[Any] | None = None
    nbytes: int = 0

    def compact(self, pool: Pool) -> None:
        """Forget the values, and hold the addresses in a fraction of their memory."""
        if self.found is None:
            return
        addresses, self.found = self.joined(pool).addresses, None
        self.nbytes = 0
        if len(addresses):
            self.first, self.gaps = int(addresses[0]), _gaps(addresses, pool)
            self.nbytes = self.gaps.nbytes

    def joined(self, pool: Pool, threads: Threads | None = None) -> Changes:
        """What was found, as one."""
        assert self.found is not None, "it was made small"
        if len(self.found) != 1:
            self.found = [joined(self.found, pool, threads)]
        return self.found[0]

    def write(self, addresses: Integers, pool: Pool) -> None:
        """Write the addresses."""
        if self.found is not None:
            addresses[:] = self.joined(pool).addresses
        elif self.gaps is not None:
            addresses[0] = self.first
            addresses[1:] = self.gaps
            np.cumsum(addresses, out=addresses)

    def __len__(self) -> int:
        if self.found is not None:
            return sum(len(changes.addresses) for changes in self.found)
        return 0 if self.gaps is None else len(self.gaps) + 1


def _gaps(addresses: Integers, pool: Pool) -> npt.NDArray[Any]:
    """In as few bytes as the largest takes."""
    for dtype in (np.uint16, np.uint32, np.int64):
        gaps = pool.room((len(addresses) - 1) * np.dtype(dtype).itemsize).view(dtype)
        most = np.iinfo(dtype).max
        for start in range(0, len(gaps), _BLOCK):  # each in the cache
            block = addresses[start : start + _BLOCK + 1]
            difference = block[1:] - block[:-1]
            if int(difference.max()) > most:
                break
            gaps[start : start + _BLOCK] = difference
        else:
            return gaps
    raise AssertionError("a gap between two int64 is one")


class History:
    """Findings, the oldest of which are forgotten where there is no room for all.

    Args:
        limit: Bytes in all.
        pool: Gives the memory.
        only_last: Keep no more than the last.

    Attributes:
        oldest: The first mark from which on everything found is known.
    """

    def __init__(self, limit: int, pool: Pool, *, only_last: bool) -> None:
        self._limit, self._pool, self._only_last = limit, pool, only_last
        self._entries: deque[_Entry] = deque()
        self.oldest = 0

    @property
    def nbytes(self) -> int:
        """What it holds."""
        return sum(entry.nbytes for entry in self._entries)

    def restart(self, mark: int) -> None:
        """Forget everything: nothing before `mark` is known."""
        self._entries.clear()
        self.oldest = mark

    def compact(self) -> None:
        """Make what was found last small, before something else is appended."""
        if self._entries and not self._only_last:
            self._entries[-1].compact(self._pool)

    @property
    def last(self) -> list[Changes]:
        """What was found last, unless it was made small."""
        return (self._entries[-1].found or []) if self._entries else []

    def append(self, mark: int, found: list[Changes]) -> None:
        """Keep what was found between the last mark and `mark`, in ranges that do not overlap; none of it is empty."""
        nbytes = sum(changes.addresses.nbytes + changes.values.nbytes for changes in found)
        self._entries.append(_Entry(mark, found, nbytes=nbytes))
        while self._entries and (self.nbytes > self._limit or (self._only_last and len(self._entries) > 1)):
            self.oldest = self._entries.popleft().mark

    def since(self, mark: int, gather: Callable[[Integers], Bytes], threads: Threads | None = None) -> Changes | None:
        """What was found after `mark`, with present values; None if that is no longer known.

        Args:
            mark: An earlier mark.
            gather: Gives the present values at ascending addresses.
            threads: Help to put together what was found last.
        """
        if mark < self.oldest:
            return None
        entries = [entry for entry in self._entries if entry.mark > mark]
        if not entries:
            return empty()
        if len(entries) == 1 and entries[0].found is not None:
            return entries[0].joined(self._pool, threads)
        addresses = self._union(entries)
        return Changes(addresses, gather(addresses))

    def _union(self, entries: list[_Entry]) -> Integers:
        every, end = self._pool.room(8 * sum(map(len, entries))).view(np.int64), 0
        for entry in entries:
            entry.write(every[end : end + len(entry)], self._pool)
            end += len(entry)
        every.sort(kind="stable")  # merges what is sorted in runs
        first = self._pool.room(len(every)).view(np.bool_)
        first[:1] = True
        np.not_equal(every[1:], every[:-1], out=first[1:])
        addresses = self._pool.room(8 * int(np.count_nonzero(first))).view(np.int64)
        return np.compress(first, every, out=addresses)
