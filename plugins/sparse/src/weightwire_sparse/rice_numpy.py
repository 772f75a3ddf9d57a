"""Rice coding of one group in numpy; the format is described in `rice`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weightwire_sparse.pieces import Integers
from weightwire_sparse.rice import GROUP, Group, Words

_RAMP = np.arange(GROUP)


def encode_group(addresses: Integers) -> Group:
    """Code 1 to `GROUP` ascending addresses."""
    count = len(addresses)
    gaps = np.zeros(count, np.int64)
    np.subtract(addresses[1:], addresses[:-1], out=gaps[1:])
    gaps[1:] -= 1
    total = int(addresses[-1]) - int(addresses[0]) - (count - 1)
    single = _parameter(gaps, total)
    runs = int(np.count_nonzero(gaps)) + 1
    if 2 * runs <= count:
        starts = np.concatenate(([0], np.flatnonzero(gaps)))
        lengths = np.diff(starts, append=count) - 1
        before = _parameter(gaps[starts], total)
        length = _parameter(lengths, count - runs)
        if before.cost + length.cost < single.cost:
            words = np.concatenate((_pack(gaps[starts], before), _pack(lengths, length)))
            return Group(runs, before.unary, length.unary, before.bits, length.bits, words)
    return Group(count, single.unary, 0, single.bits, 0, _pack(gaps, single))


def decode_group(group: Group, first: int, limit: int, out: Integers) -> int:
    """Write the addresses of a group into `out`; the number of what is wrong in `rice.FAULTS`, or 0."""
    runs, count = group.runs, len(out)
    size = -(-runs // 64) * group.gap_bits + group.gap_unary
    sums = _sums(group.words[:size], runs, group.gap_bits, limit)
    if sums is None:
        return 1
    if runs < count:
        lengths = _sums(group.words[size:], runs, group.length_bits, count)
        if lengths is None:
            return 1
        lengths = np.diff(lengths, prepend=0) + 1
        if int(lengths.sum()) != count:
            return 2
        sums = np.repeat(sums, lengths)
    np.add(sums, _RAMP[:count], out=out)
    out += first
    # A sum that went over what an int64 holds is negative here, or the last address is too large.
    return 0 if out[0] >= first and (out[1:] > out[:-1]).all() and out[-1] < limit else 3


class _Parameter(NamedTuple):
    bits: int
    unary: int  # words of unary bits
    cost: int  # bits in all


def _parameter(values: Integers, total: int) -> _Parameter:
    """The parameter with the fewest bits, found downhill from the mean's: the bits are convex in the parameter."""

    def cost(bits: int) -> int:
        return len(values) * (bits + 1) + int((values >> bits).sum())

    bits = max((total // len(values)).bit_length() - 1, 0)
    fewest = cost(bits)
    for step in (1, -1):
        start = bits
        while 0 <= bits + step <= 62 and (found := cost(bits + step)) < fewest:
            bits, fewest = bits + step, found
        if bits != start:
            break
    return _Parameter(bits, -(-(fewest - len(values) * bits) // 64), fewest)


def _pack(values: Integers, parameter: _Parameter) -> Words:
    """The words of a stream of values."""
    bits, unary, _ = parameter
    number = len(values)
    lanes = -(-number // 64)
    ends = np.cumsum(values >> bits)
    ends += _RAMP[:number]
    ones = np.zeros(unary * 64, np.bool_)
    ones[ends] = True
    words = np.zeros(lanes * bits + unary, np.uint64)
    words[lanes * bits :] = np.packbits(ones, bitorder="little").view(np.uint64)
    if bits:
        low = np.zeros((64, lanes), np.uint64)
        np.bitwise_and(values.view(np.uint64), np.uint64((1 << bits) - 1), out=low.reshape(-1)[:number])
        packed = words[: lanes * bits].reshape(bits, lanes)
        for row in range(64):
            word, shift = divmod(row * bits, 64)
            packed[word] |= low[row] << np.uint64(shift)
            if shift + bits > 64:
                packed[word + 1] |= low[row] >> np.uint64(64 - shift)
    return words


def _sums(words: Words, number: int, bits: int, limit: int) -> Integers | None:
    """The running sums, modulo 2^64, of a stream's values, or None where its unary bits are not those of so many.

    A sum of the values' upper parts over `limit` is refused too, so that no shift loses bits.
    """
    lanes = -(-number // 64)
    ones = np.unpackbits(words[lanes * bits :].view(np.uint8), bitorder="little").view(np.bool_)
    if np.count_nonzero(ones) != number:
        return None
    ends = np.flatnonzero(ones)
    ends -= _RAMP[:number]
    if int(ends[-1]) > limit >> bits:
        return None
    if not bits:
        return ends
    packed = words[: lanes * bits].reshape(bits, lanes)
    low = np.empty((64, lanes), np.uint64)
    for row in range(64):
        word, shift = divmod(row * bits, 64)
        np.right_shift(packed[word], np.uint64(shift), out=low[row])
        if shift + bits > 64:
            low[row] |= packed[word + 1] << np.uint64(64 - shift)
    low &= np.uint64((1 << bits) - 1)
    sums = np.cumsum(low.reshape(-1)[:number].view(np.int64))
    ends <<= bits
    sums += ends
    return sums
