"""The columns of moves, put together from the columns of the classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightwire.resharding.classes import Block
from weightwire.resharding.demands import Wanted
from weightwire.resharding.moves import Beside, Moves, Writes, cut_messages
from weightwire.resharding.source_layout import Integers

Entry = tuple[int, int, int, int]
"""Parameter, cell, sender and receiver of the pieces of one block."""


def assemble(
    entries: Sequence[Entry],
    blocks: Sequence[Block],
    wanted: Sequence[Wanted] | None,
    axes: tuple[int, int],
    buffer: int,
    large: int,
    groups: Integers | None = None,
    beside: int | None = None,
) -> Moves:
    """The moves of entries in their order, cut into messages.

    Args:
        entries: In the order of the plan.
        blocks: Of each entry.
        wanted: Of each entry, where the receiver's writes are wanted as well.
        axes: Axes of a piece, and of its repeats.
        buffer: Bytes of a message at most.
        large: Bytes from which on a move is a segment of its own.
        groups: Of each parameter; None where all are of one.
        beside: Bytes of a message besides `buffer`, of large moves that are contiguous on either side.
    """
    lengths = np.array([len(each.rows) for each in blocks], np.int64)
    keys = np.repeat(np.array(entries, np.int64).reshape(-1, 4), lengths, axis=0)
    rows = np.concatenate([np.zeros((0, 5 + 2 * axes[0]), np.int64), *(each.rows for each in blocks)])
    parameter, cell, sender, receiver = keys.T.copy()
    piece, nbytes, direct, itemsize, offset = rows[:, :5].T.copy()
    sizes, strides = rows[:, 5 : 5 + axes[0]].copy(), rows[:, 5 + axes[0] :].copy()
    pair = sender * (int(receiver.max(initial=0)) + 1) + receiver
    message, place = cut_messages(
        pair,
        nbytes,
        itemsize,
        buffer,
        large,
        None if groups is None else groups[parameter],
        None if beside is None else Beside((direct == 1) & (nbytes >= large), beside),
    )
    writes = None if wanted is None else _writes(lengths, blocks, wanted, axes)
    return Moves(
        parameter, cell, sender, receiver, piece, nbytes, direct, offset, sizes, strides, message, place, writes
    )


def _writes(lengths: Integers, blocks: Sequence[Block], wanted: Sequence[Wanted], axes: tuple[int, int]) -> Writes:
    counts = np.array([len(each.writes) for each in blocks], np.int64)
    rows = np.concatenate([np.zeros((0, 3 + axes[0] + 2 * axes[1]), np.int64), *(each.writes for each in blocks)])
    first_move = np.repeat(np.cumsum(lengths) - lengths, counts)
    slots = np.array([len(each.targets) for each in wanted], np.int64)
    slot = rows[:, 1] + np.repeat(np.cumsum(slots) - slots, counts)
    targets = np.array([target for each in wanted for target in each.targets], np.int64)
    bases = np.array([offset for each in wanted for offset in each.offsets], np.int64)
    strides, repeat_sizes, repeat_strides = np.split(rows[:, 3:], [axes[0], axes[0] + axes[1]], axis=1)
    return Writes(
        rows[:, 0] + first_move, targets[slot], rows[:, 2] + bases[slot], strides, repeat_sizes, repeat_strides
    )
