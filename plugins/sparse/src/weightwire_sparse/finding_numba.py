"""The compiled kernel; imported only where it was chosen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Literal

import numba
import numpy as np

from weightwire_sparse.changes import Bytes, Changes
from weightwire_sparse.compiling import compiled
from weightwire_sparse.finding import words
from weightwire_sparse.memory import Pool

_BLOCK_BYTES = 4 << 20
_ARENA = 8 << 20
"""Elements, and bytes, for what is found in many blocks."""

Scan = Callable[..., int]


class NumbaKernel:
    """Compares eight bytes at a time, and emits addresses and values in the same pass.

    Args:
        widths: Bytes of elements that code is made ready for; for others that is done when they come.
    """

    name: Literal["numpy", "numba"] = "numba"
    owned = True

    def __init__(self, widths: Iterable[int] = ()) -> None:
        self._own = threading.local()
        for width in widths:
            _compiled(width)

    def find(self, present: Bytes, snapshot: Bytes, width: int, first: int, pool: Pool) -> Iterator[Changes]:
        """See `Kernel`."""
        scan = _compiled(width)
        for start in range(0, len(present), _BLOCK_BYTES):
            now, before = present[start : start + _BLOCK_BYTES], snapshot[start : start + _BLOCK_BYTES]
            even = len(now) & -8
            views = now[:even].view(np.uint64), before[:even].view(np.uint64), words(now, width), words(before, width)
            arena = self._arena(pool, len(now) // width + 1, len(now) + 16)
            count = scan(*views, first + start // width, arena.addresses, words(arena.values, width))
            if count:
                yield arena.cut(count, width)

    def rest(self) -> None:
        """See `Kernel`: what is found next is written to the beginning of memory again."""
        self._own = threading.local()

    def _arena(self, pool: Pool, addresses: int, nbytes: int) -> _Arena:
        """This thread's, with room for so much more."""
        arena: _Arena | None = getattr(self._own, "arena", None)
        if arena is None or arena.pool is not pool or len(arena.addresses) < addresses or len(arena.values) < nbytes:
            self._own.arena = arena = _Arena(pool, max(addresses, _ARENA), max(nbytes, _ARENA))
        return arena


class _Arena:
    """Memory that findings are written to one after the other. Only what is written of it becomes memory.

    Attributes:
        pool: Gave it, and takes it back when nothing found there is held any more.
        addresses: What is left for addresses.
        values: What is left for values.
    """

    def __init__(self, pool: Pool, addresses: int, nbytes: int) -> None:
        self.pool = pool
        self.addresses = pool.room(8 * addresses).view(np.int64)
        self.values = pool.room(nbytes)

    def cut(self, count: int, width: int) -> Changes:
        """The next `count` addresses and values, which have been written."""
        addresses, self.addresses = self.addresses[:count], self.addresses[count:]
        nbytes = count * width
        values, self.values = self.values[:nbytes], self.values[nbytes + -nbytes % 16 :]
        return Changes(addresses, values)


@cache
def _compiled(width: int) -> Scan:
    """The scan for elements of `width` bytes, from the disk where it was compiled before."""
    # Memory may begin anywhere: code for arrays that are not aligned takes all, and costs nothing more.
    word = numba.types.Array(numba.uint64, 1, "C", aligned=False)
    long = numba.types.Array(numba.int64, 1, "C", aligned=True)
    if width > 8:
        pairs = numba.types.Array(numba.uint64, 2, "C", aligned=False)
        return compiled(_scan_rows, numba.int64(word, word, pairs, pairs, numba.int64, long, pairs))
    element = numba.types.Array(getattr(numba, f"uint{8 * width}"), 1, "C", aligned=False)
    return compiled(_scan_of(width), numba.int64(word, word, element, element, numba.int64, long, element))


def _scan_of(width: int) -> Scan:
    # Constants to the compiler, which then unrolls the loop over them: twice as fast as reading them from an array.
    lanes, bits, mask = 8 // width, 8 * width, np.uint64(2 ** (8 * width) - 1)

    def scan(
        now_words: Any, before_words: Any, now: Any, before: Any, first: int, addresses: Any, values: Any
    ) -> int:  # pragma: no cover - compiled
        # A branch for four words, one for a word, none for an element: what did not change is overwritten by the next.
        count = 0
        for start in range(0, len(now_words) // 4 * 4, 4):
            if (
                (now_words[start] ^ before_words[start])
                | (now_words[start + 1] ^ before_words[start + 1])
                | (now_words[start + 2] ^ before_words[start + 2])
                | (now_words[start + 3] ^ before_words[start + 3])
            ) == 0:
                continue
            for place in range(start, start + 4):
                word = now_words[place]
                difference = word ^ before_words[place]
                if difference != 0:
                    for lane in range(lanes):
                        shift = np.uint64(bits * lane)
                        addresses[count] = first + place * lanes + lane
                        values[count] = (word >> shift) & mask
                        count += ((difference >> shift) & mask) != 0
        for place in range(len(now_words) // 4 * 4 * lanes, len(now)):
            value = now[place]
            if value != before[place]:
                addresses[count] = first + place
                values[count] = value
                count += 1
        return count

    return scan


def _scan_rows(
    now_words: Any, before_words: Any, now: Any, before: Any, first: int, addresses: Any, values: Any
) -> int:  # pragma: no cover - compiled
    count = 0
    for place in range(len(now)):
        if now[place, 0] != before[place, 0] or now[place, 1] != before[place, 1]:
            addresses[count] = first + place
            for part in range(2):
                values[count, part] = now[place, part]
            count += 1
    return count
