"""The moves of one rank, or of all, as columns of integers; how they are cut into messages; their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightwire.resharding.source_layout import Integers


@dataclass(frozen=True, slots=True, eq=False)
class Writes:
    """Where what a worker receives goes; one or more rows for each of its moves, in their order.

    `target.as_strided(repeat_sizes + sizes, repeat_strides + strides, offset).copy_(piece.view(sizes))`, with the
    sizes of the move. Axes are filled up in front with size 1 and stride 0.

    Attributes:
        move: Row of the move.
        target: What the demand calls its target.
        offset: In elements of it.
        strides: Shape (rows, axes).
        repeat_sizes: Shape (rows, repeated axes): each element is written along them again.
        repeat_strides: Shape (rows, repeated axes).
    """

    move: Integers
    target: Integers
    offset: Integers
    strides: Integers
    repeat_sizes: Integers
    repeat_strides: Integers

    def __len__(self) -> int:
        return len(self.move)


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Moves in the one order that all ranks follow: by parameter, cell, receiver, piece.

    A move is `shard.as_strided(sizes, strides, offset)` of the sender's local shard, contiguous on the wire.

    Attributes:
        parameter: Index into the metadata.
        cell: Of the parameter, by row-major order of where cells start.
        sender: Trainer rank.
        receiver: Worker rank.
        piece: Ordinal within (parameter, cell, receiver).
        nbytes: On the wire.
        direct: 1 where it is contiguous in the shard and in its one target.
        offset: In elements of the sender's shard.
        sizes: Shape (rows, axes), filled up in front with 1.
        strides: Shape (rows, axes), in elements of the shard, filled up in front with 0.
        message: Ordinal of its message among those of its (sender, receiver).
        place: Byte at which it lies in a buffer of the message, where it is packed.
        writes: On the worker's side; None in a trainer rank's part.
    """

    parameter: Integers
    cell: Integers
    sender: Integers
    receiver: Integers
    piece: Integers
    nbytes: Integers
    direct: Integers
    offset: Integers
    sizes: Integers
    strides: Integers
    message: Integers
    place: Integers
    writes: Writes | None = None

    def __len__(self) -> int:
        return len(self.parameter)

    @property
    def columns(self) -> dict[str, Integers]:
        """The columns that both sides of a pair know."""
        return {name: getattr(self, name) for name in _COLUMNS}

    def messages(self) -> Iterator[NDArray[np.intp]]:
        """The rows of each message, messages in the order of their last rows: that in which they are complete.

        All ranks walk them so.
        """
        if len(self):
            keys = np.stack([self.sender, self.receiver, self.message], axis=1)
            _, from_the_end, group = np.unique(keys[::-1], axis=0, return_index=True, return_inverse=True)
            group = group.reshape(-1)[::-1]
            order = np.argsort(-from_the_end[group], kind="stable")
            ends = np.flatnonzero(np.diff(group[order])) + 1
            yield from np.split(order, ends)

    def pair_digests(self) -> dict[tuple[int, int], str]:
        """The SHA-256 of what each (sender, receiver) agreed to move, how and in which messages."""
        if not len(self):
            return {}
        rows = np.column_stack(list(self.columns.values())).astype("<i8")
        order = np.lexsort((self.receiver, self.sender))
        pairs = np.stack([self.sender, self.receiver], axis=1)[order]
        starts = np.concatenate([[0], np.flatnonzero(np.diff(pairs, axis=0).any(axis=1)) + 1])
        return {
            (int(pairs[start, 0]), int(pairs[start, 1])): hashlib.sha256(part.tobytes()).hexdigest()
            for start, part in zip(starts, np.split(rows[order], starts[1:]), strict=True)
        }


_COLUMNS = (
    "parameter", "cell", "sender", "receiver", "piece", "nbytes", "direct", "offset", "sizes", "strides", "message",
    "place",
)  # fmt: skip


def segments(nbytes: Sequence[int], large: int) -> list[list[int]]:
    """How the moves of one message lie on the wire: the small ones next to each other, then each large one by itself.

    Args:
        nbytes: Of each move.
        large: Bytes from which on a move is large.

    Returns:
        The places of the moves in the message, for each segment.
    """
    small = [place for place, size in enumerate(nbytes) if size < large]
    alone = [[place] for place, size in enumerate(nbytes) if size >= large]
    return [small, *alone] if small else alone


class Beside(NamedTuple):
    """Moves that need no room in a buffer, since they travel from where they lie to where they belong.

    Attributes:
        moves: For each move whether it is one; it must be large.
        most: Bytes of them that a message may have, unless it is one move.
    """

    moves: NDArray[np.bool_]
    most: int


def cut_messages(
    pair: Integers,
    nbytes: Integers,
    itemsize: Integers,
    most: int,
    large: int,
    group: Integers | None = None,
    beside: Beside | None = None,
) -> tuple[Integers, Integers]:
    """Cut the moves of each pair, in order, into messages of at most `most` bytes; a larger move is one by itself.

    Args:
        pair: Anything that tells the pairs apart.
        nbytes: Of each move.
        itemsize: A small move begins at a multiple of it, or begins a message: between them nothing is padded.
        most: Bytes.
        large: Bytes from which on a move is a segment of its own.
        group: Of each move; a message is within one. None where all are of one.
        beside: Moves that do not count towards `most`. None where all do.

    Returns:
        For each move the ordinal of its message within its pair, and where it is put if it is packed into a buffer of
        `most` bytes: small ones from its beginning, large ones from its end, those beside it behind it.
    """
    message, place = np.zeros(len(pair), np.int64), np.zeros(len(pair), np.int64)
    # Of each pair: the messages begun, where small ones end, where large ones begin, bytes beside them, the group.
    state: dict[int, tuple[int, int, int, int, int]] = {}
    within = np.zeros(len(pair), np.int64) if group is None else group
    free = np.zeros(len(pair), np.bool_) if beside is None else beside.moves
    limit = 0 if beside is None else beside.most
    rows = zip(pair.tolist(), nbytes.tolist(), itemsize.tolist(), within.tolist(), free.tolist(), strict=True)
    for row, (key, size, aligned, mine, apart) in enumerate(rows):
        begun, low, high, extra, present = state.get(key, (0, most, 0, limit, mine))
        room = size if size < large else size + -size % _ALIGNMENT
        full = extra + size > limit if apart else low + room > high or (size < large and low % aligned)
        if full or mine != present:
            begun, low, high, extra = begun + 1, 0, max(most - most % _ALIGNMENT, 0 if apart else room), 0
        if apart:
            place[row], extra = most, extra + size
        elif size < large:
            place[row], low = low, low + size
        else:
            high -= room
            place[row] = high
        message[row], state[key] = begun - 1, (begun, low, high, extra, mine)
    return message, place


_ALIGNMENT = 16
"""Bytes at which large moves begin: of the widest element."""
