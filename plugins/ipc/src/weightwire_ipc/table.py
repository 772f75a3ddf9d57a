"""Where a sender's parameters lie: one row for each, segment and offset, in the order of the metadata.

A row of segment -1 says that the parameter comes through the ring.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch

from weightwire.errors import HandshakeError
from weightwire.layout import ParamMeta

RING = -1


def locate(pointers: Sequence[int], sizes: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The table of tensors at `pointers`.

    Args:
        pointers: Address of each tensor.
        sizes: Their bytes, int64.
        spans: First address and size of each segment.

    Returns:
        int64 of shape [n, 2]. What lies in no segment whole, or over what another row has, goes through the ring.
    """
    places = torch.tensor(pointers, dtype=torch.int64)
    table = torch.full((len(pointers), 2), RING, dtype=torch.int64)
    for number, (start, nbytes) in enumerate(spans):
        inside = (places >= start) & (places + sizes <= start + nbytes) & (sizes > 0)
        table[inside, 0] = number
        table[inside, 1] = places[inside] - start
    table[_overlapping(table, sizes)] = RING
    return table


def compact(table: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The table over only those segments that something lies in, and their numbers in `table`."""
    used = sorted(set(table[:, 0].tolist()) - {RING})
    numbers = torch.full((max(used, default=0) + 2,), RING, dtype=torch.int64)
    numbers[used] = torch.arange(len(used))
    return torch.stack([numbers[table[:, 0]], table[:, 1]], dim=1), used


def _overlapping(table: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Rows whose bytes begin before those of another row of the segment have ended."""
    found = []
    for number in set(table[:, 0].tolist()):
        rows = (table[:, 0] == number).nonzero().flatten()
        if number == RING or len(rows) < 2:
            continue
        rows = rows[table[rows, 1].argsort(stable=True)]
        reached = (table[rows, 1] + sizes[rows]).cummax(0).values
        found.append(rows[1:][table[rows[1:], 1] < reached[:-1]])
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def check_table(table: torch.Tensor, metas: Sequence[ParamMeta], segments: dict[int, int]) -> None:
    """Refuse a table that came from a sender, before a byte is read by it.

    Args:
        table: int64 of shape [n, 2].
        metas: The sender's parameters.
        segments: Number and size of every segment that it has handed over.

    Raises:
        HandshakeError: A row that does not lie in a segment of this sender, is misaligned, or overlaps another.
    """
    if table.dtype != torch.int64 or table.shape != (len(metas), 2):
        raise HandshakeError(f"a table of shape {tuple(table.shape)} came for {len(metas)} parameters", transport="ipc")
    sizes = torch.tensor([meta.nbytes for meta in metas], dtype=torch.int64)
    aligned = torch.tensor([meta.dtype.itemsize for meta in metas], dtype=torch.int64)
    limits = torch.full((len(metas),), -1, dtype=torch.int64)
    in_ring = (table[:, 0] == RING) & (table[:, 1] == RING)
    for number, nbytes in segments.items():
        limits[table[:, 0] == number] = nbytes
    problems = {
        "lies in no segment that was handed over": (limits < 0) & ~in_ring,
        "lies outside its segment": (limits >= 0) & ((table[:, 1] < 0) | (table[:, 1] > limits - sizes)),
        "is not aligned": (limits >= 0) & (table[:, 1] % aligned != 0),
    }
    for words, where in problems.items():
        if where.any():
            _refuse(metas, table, int(where.nonzero()[0]), words)
    if len(over := _overlapping(table, sizes)):
        _refuse(metas, table, int(over[0]), "overlaps another parameter")


def _refuse(metas: Sequence[ParamMeta], table: torch.Tensor, row: int, words: str) -> None:
    name, (segment, offset) = metas[row].name, table[row].tolist()
    raise HandshakeError(f"{name!r}, segment {segment} at byte {offset}, {words}", transport="ipc", parameter=name)


class Layout:
    """Offsets at which parameters are laid out one after the other in a segment of their own.

    Args:
        metas: The parameters.
        align: Offsets are multiples of it.

    Attributes:
        offsets: One for each.
        nbytes: Size of the segment.
    """

    def __init__(self, metas: Sequence[ParamMeta], *, align: int) -> None:
        self.offsets: list[int] = []
        end = 0
        for meta in metas:
            self.offsets.append(end)
            end += -(-meta.nbytes // align) * align
        self.nbytes = end
        self._names = [meta.name for meta in metas]

    def names_at(self, offsets: Sequence[int]) -> list[str]:
        """The parameters that these bytes belong to, each once."""
        return list(dict.fromkeys(self._names[bisect.bisect_right(self.offsets, at) - 1] for at in offsets))

    def names_in(self, pages: Sequence[int], page: int) -> list[str]:
        """The parameters that have bytes in these pages of `page` bytes, each once."""
        found: dict[str, None] = {}
        for number in pages:
            first = max(0, bisect.bisect_right(self.offsets, number * page) - 1)
            end = bisect.bisect_left(self.offsets, (number + 1) * page)
            found |= dict.fromkeys(self._names[first:end])
        return list(found)
