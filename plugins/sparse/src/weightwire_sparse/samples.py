"""About one in a thousand elements, by which to tell how much changes from round to round."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from weightwire.source import as_bytes
from weightwire.source_check import as_plain
from weightwire_sparse.changes import Bytes
from weightwire_sparse.finding import words
from weightwire_sparse.pieces import AddressSpace

_CHUNK = 1024
_ONE_IN = 1000
_LARGE = 256 * _CHUNK


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Chunks of one piece at equal distances.

    Attributes:
        number: Of the piece.
        count: How many.
        span: Elements from one to the next.
        start: Where in each span the chunk begins.
        size: Elements of a chunk.
    """

    number: int
    count: int
    span: int
    start: int
    size: int


class Samples:
    """A copy of scattered chunks of one sender's pieces, of every large one at least one.

    Args:
        space: The pieces.
    """

    def __init__(self, space: AddressSpace) -> None:
        self._chunks = list(_scattered(space))
        self._widths = space.widths.tolist()
        self._held: list[Bytes] = []

    def differing(self, tensor_of: Callable[[int], Tensor]) -> float | None:
        """The share of elements that are not what they were the last time; None the first time.

        Args:
            tensor_of: Gives the present tensor of a piece.
        """
        before, self._held = self._held, [self._read(chunks, tensor_of(chunks.number)) for chunks in self._chunks]
        if not before and self._chunks:
            return None
        differing = total = 0
        for chunks, old, new in zip(self._chunks, before, self._held, strict=True):
            differ = words(old, self._widths[chunks.number]) != words(new, self._widths[chunks.number])
            differing += int(np.count_nonzero(differ if differ.ndim == 1 else differ.any(axis=1)))
            total += len(differ)
        return differing / max(total, 1)

    def _read(self, chunks: _Chunks, tensor: Tensor) -> Bytes:
        width = self._widths[chunks.number]
        content = as_bytes(as_plain(tensor.detach()))[: chunks.count * chunks.span * width]
        rows = content.view(chunks.count, -1)[:, chunks.start * width : (chunks.start + chunks.size) * width]
        return np.array(rows.cpu().numpy()).reshape(-1)


def _scattered(space: AddressSpace) -> Iterator[_Chunks]:
    """The same on every call."""
    places = random.Random(0)
    owed = 0.0
    for number, piece in enumerate(space.pieces):
        numel = piece.numel
        owed += numel / _ONE_IN
        size = min(numel, _CHUNK)
        count = max(min(int(owed), numel) // size, int(numel >= _LARGE))
        if count:
            span = numel // count
            yield _Chunks(number, count, span, places.randint(0, span - size), size)
            owed -= count * size
