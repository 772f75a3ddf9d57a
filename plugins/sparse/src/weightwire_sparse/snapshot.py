"""What one sender held when it last looked: a copy of it, or a digest of each block."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from weightwire_sparse.changes import Bytes, Changes
from weightwire_sparse.finding import Kernel, segments, words
from weightwire_sparse.memory import Pool, Recorder, new_memory
from weightwire_sparse.pieces import AddressSpace, Integers

SMALL = 64 << 10
"""Bytes from which on a piece is looked at by itself; smaller ones lie side by side and may be looked at as one."""

_ALIGNMENT = 64
_DIGEST = 16


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Consecutive elements: of one piece, or all of several small ones with consecutive numbers.

    Attributes:
        number: Of the piece, or of the first of them.
        start: The first element of that piece that is part of it.
        present: The bytes that are there now; may be read until the work on this part is done.
    """

    number: int
    start: int
    present: Bytes


class CopySnapshot:
    """A copy of every piece, in the order of their addresses.

    Args:
        space: The pieces.
        kernel: Compares them.

    Raises:
        MemoryError: There is not enough.
    """

    only_last = False
    merges = True
    grain = 16

    def __init__(self, space: AddressSpace, kernel: Kernel) -> None:
        self._space, self._kernel = space, kernel
        self._widths = space.widths.tolist()
        self._firsts = space.firsts.tolist()
        self._offsets, self.nbytes = _places(space)
        self._memory = new_memory(self.nbytes)

    def compare(self, recorder: Recorder, part: Part) -> list[Changes]:
        """Find what of `part` is new."""
        if recorder.overflowed:
            return []
        width = self._widths[part.number]
        first = self._firsts[part.number] + part.start
        keep = recorder.noted if self._kernel.owned else recorder.kept
        found = map(keep, self._kernel.find(part.present, self._held(part), width, first, recorder.pool))
        return [changes for changes in found if changes is not None]

    def copy(self, part: Part) -> list[Changes]:
        """Take `part` over."""
        np.copyto(self._held(part), part.present)
        return []

    def advance(self, found: Sequence[Changes], pool: Pool) -> None:
        """Take what `compare` has found over."""
        for changes in found:
            places, end = self._places_of(changes.addresses, pool), 0
            for width, low, high in self._by_width(changes.addresses):
                values = words(changes.values[end : end + (high - low) * width], width)
                words(self._memory, width)[places[low:high]] = values
                end += (high - low) * width

    def piece(self, number: int) -> Bytes:
        """All bytes of a piece."""
        start = self._offsets[number]
        return self._memory[start : start + self._space.pieces[number].nbytes]

    def gather(self, addresses: Integers, pool: Pool) -> Bytes:
        """The values at ascending `addresses`, one after the other."""
        places, end = self._places_of(addresses, pool), 0
        values = pool.room(int((self._space.counts(addresses) * self._space.widths).sum()))
        for width, low, high in self._by_width(addresses):
            target = words(values[end : end + (high - low) * width], width)
            np.take(words(self._memory, width), places[low:high], axis=0, out=target, mode="clip")
            end += (high - low) * width
        return values

    def _places_of(self, addresses: Integers, pool: Pool) -> Integers:
        """Where ascending `addresses` are in the memory, in elements of their widths."""
        counts = self._space.counts(addresses)
        ends = [0, *np.cumsum(counts).tolist()]
        places = pool.room(addresses.nbytes).view(np.int64)
        for number in np.flatnonzero(counts).tolist():
            span = slice(ends[number], ends[number + 1])
            shift = self._offsets[number] // self._widths[number] - self._firsts[number]
            np.add(addresses[span], shift, out=places[span])
        return places

    def _by_width(self, addresses: Integers) -> Iterator[tuple[int, int, int]]:
        """The range of ascending `addresses` that is of each width of elements, widest first."""
        for width, start, stop in segments(self._space):
            low, high = np.searchsorted(addresses, (start, stop)).tolist()
            yield width, low, high

    def _held(self, part: Part) -> Bytes:
        start = self._offsets[part.number] + part.start * self._widths[part.number]
        return self._memory[start : start + len(part.present)]


def _places(space: AddressSpace) -> tuple[list[int], int]:
    """Where each piece begins in a copy, and where the last one ends."""
    offsets, end = [], 0
    for piece in space.pieces:
        # A processor compares what is aligned twice as fast; small ones lie side by side to be compared as one.
        step = piece.dtype.itemsize if piece.nbytes < SMALL else _ALIGNMENT
        offsets.append(start := -(-end // step) * step)
        end = start + piece.nbytes
    return offsets, end + -end % 16


class HashSnapshot:
    """A digest of each block of every piece; a block that changed counts as changed in all its elements.

    Args:
        space: The pieces.
        block: Bytes of a block.
    """

    only_last = True
    merges = False

    def __init__(self, space: AddressSpace, block: int) -> None:
        self.grain = block
        self._firsts = space.firsts.tolist()
        self._widths = space.widths.tolist()
        self._rows = [0, *accumulate(-(-piece.nbytes // block) for piece in space.pieces)]
        self._digests = bytearray(_DIGEST * self._rows[-1])
        self._fresh: dict[int, bytes] = {}
        self.nbytes = len(self._digests)

    def compare(self, recorder: Recorder, part: Part) -> list[Changes]:
        """Find the blocks of `part` that are new."""
        width = self._widths[part.number]
        first = self._firsts[part.number] + part.start
        found = []
        for start, place, digest in self._blocks(part):
            self._fresh.pop(place, None)
            if self._digests[place : place + _DIGEST] != digest:
                self._fresh[place] = digest
                values = part.present[start : start + self.grain]
                address = first + start // width
                addresses = np.arange(address, address + len(values) // width, dtype=np.int64)
                found.append(recorder.kept(Changes(addresses, values)))
        return [changes for changes in found if changes is not None]

    def copy(self, part: Part) -> list[Changes]:
        """Remember `part`."""
        for _, place, digest in self._blocks(part):
            self._fresh.pop(place, None)
            self._digests[place : place + _DIGEST] = digest
        return []

    def advance(self, found: Sequence[Changes], pool: Pool) -> None:
        """Remember what `compare` has found."""
        for place, digest in self._fresh.items():
            self._digests[place : place + _DIGEST] = digest
        self._fresh.clear()

    def _blocks(self, part: Part) -> list[tuple[int, int, bytes]]:
        """Each block's start in `part`, where its digest is kept, and its digest."""
        row = self._rows[part.number] + part.start * self._widths[part.number] // self.grain
        starts = range(0, len(part.present), self.grain)
        content = part.present.data
        return [
            (start, (row + place) * _DIGEST, _digest(content[start : start + self.grain]))
            for place, start in enumerate(starts)
        ]


Snapshot = CopySnapshot | HashSnapshot


def snapshot_of(space: AddressSpace, kernel: Kernel, block: int | None) -> Snapshot:
    """A copy compared by `kernel`, or digests of blocks of `block` bytes.

    Raises:
        MemoryError: There is not enough.
    """
    return CopySnapshot(space, kernel) if block is None else HashSnapshot(space, block)


def _digest(content: memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()
