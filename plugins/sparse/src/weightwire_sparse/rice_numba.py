"""Rice coding of one group, compiled, without the interpreter's lock; the format is described in `rice`.

The kernels see read-only arrays and plain integers only, so each is compiled once. Nothing checks bounds for them:
`rice` has checked the table, and what the words themselves say is checked here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire_sparse.compiling import compiled
from weightwire_sparse.pieces import Integers
from weightwire_sparse.rice import Group, Words

_ONE = np.uint64(1)
_SIX, _BELOW_64, _PLACE = np.uint64(6), np.uint64(63), np.uint64(58)
_MULTIPLIER = np.uint64(0x03F79D71B4CB0A89)  # de Bruijn's: its 64 windows of 6 bits all differ
_TRAILING = np.zeros(64, np.int64)  # how many zeros are below the only one of a word, by window
for _zeros in range(64):
    _TRAILING[(int(_MULTIPLIER) << _zeros) % 2**64 >> 58] = _zeros


def encode_group(addresses: Integers) -> Group:
    """Code 1 to `GROUP` ascending addresses."""
    return Group(*_encode(_frozen(addresses)))


def decode_group(group: Group, first: int, limit: int, out: Integers) -> int:
    """Write the addresses of a group into `out`; the number of what is wrong in `rice.FAULTS`, or 0."""
    runs, gap_unary, length_unary, gap_bits, length_bits, words = group
    return _decode(runs, gap_unary, length_unary, gap_bits, length_bits, _frozen(words), first, limit, out)


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


@compiled
def _cost(values: Integers, bits: int) -> Any:
    """Bits of a stream; an int64."""
    total, shift = np.uint64(0), np.uint64(bits)
    for place in range(len(values)):
        total += np.uint64(values[place]) >> shift
    return np.int64(total) + len(values) * (bits + 1)


@compiled
def _parameter(values: Integers, total: int) -> tuple[int, int, int]:
    """The parameter with the fewest bits, its words of unary bits and all bits: found as in `rice_numpy`."""
    number = len(values)
    mean = total // number
    bits = 0
    while mean >> (bits + 1) > 0:
        bits += 1
    fewest = _cost(values, bits)
    step = 1
    start = bits
    while True:
        found = _cost(values, bits + step) if 0 <= bits + step <= 62 else fewest
        if found < fewest:
            bits, fewest = bits + step, found
        elif step == 1 and bits == start:
            step = -1
        else:
            return bits, (fewest - number * bits + 63) // 64, fewest


@compiled
def _pack(values: Integers, bits: int, words: Words) -> None:
    """Write a stream into its words, which are zero; unsigned indices cost less, since they are never from the end."""
    number = len(values)
    lanes = (number + 63) // 64
    mask = (_ONE << np.uint64(bits)) - _ONE
    if bits > 0:
        for row in range((number + lanes - 1) // lanes):
            source = values[row * lanes : min((row + 1) * lanes, number)]
            word, place = row * bits // 64 * lanes, row * bits % 64
            into = words[word : word + len(source)]
            for lane in range(len(source)):
                into[lane] |= (np.uint64(source[lane]) & mask) << np.uint64(place)
            if place + bits > 64:
                into = words[word + lanes : word + lanes + len(source)]
                for lane in range(len(source)):
                    into[lane] |= (np.uint64(source[lane]) & mask) >> np.uint64(64 - place)
    unary = words[lanes * bits :]
    end, shift = np.uint64(0), np.uint64(bits)
    for value in values:
        end += np.uint64(value) >> shift
        unary[end >> _SIX] |= _ONE << (end & _BELOW_64)
        end += _ONE


@compiled
def _encode(addresses: Integers) -> tuple[int, int, int, int, int, Words]:
    """The fields of `rice.Group`."""
    count = len(addresses)
    gaps = np.zeros(count, np.int64)
    runs = 1
    for place in range(1, count):
        gaps[place] = addresses[place] - addresses[place - 1] - 1
        runs += gaps[place] != 0
    total = addresses[-1] - addresses[0] - (count - 1)
    bits, unary, cost = _parameter(gaps, total)
    if 2 * runs <= count:
        starts, lengths = _runs(gaps, runs)
        start_bits, start_unary, start_cost = _parameter(starts, total)
        length_bits, length_unary, length_cost = _parameter(lengths, count - runs)
        if start_cost + length_cost < cost:
            lanes = (runs + 63) // 64
            size = lanes * start_bits + start_unary
            words = np.zeros(size + lanes * length_bits + length_unary, np.uint64)
            _pack(starts, start_bits, words[:size])
            _pack(lengths, length_bits, words[size:])
            return runs, start_unary, length_unary, start_bits, length_bits, words
    words = np.zeros((count + 63) // 64 * bits + unary, np.uint64)
    _pack(gaps, bits, words)
    return count, unary, 0, bits, 0, words


@compiled
def _runs(gaps: Integers, runs: int) -> tuple[Integers, Integers]:
    """The gap before each run, and how many addresses it has after its first."""
    starts, lengths = np.zeros(runs, np.int64), np.zeros(runs, np.int64)
    run = 0
    for gap in gaps[1:]:
        if gap != 0:
            run += 1
            starts[run] = gap
        else:
            lengths[run] += 1
    return starts, lengths


@compiled
def _sums(words: Words, bits: int, limit: int, sums: Integers) -> bool:
    """Write the running sums of a stream, modulo 2^64; false where its unary bits are not those of so many values.

    A sum of the values' upper parts over `limit` is refused too, so that no shift loses bits.
    """
    number = len(sums)
    lanes = (number + 63) // 64
    mask = (_ONE << np.uint64(bits)) - _ONE
    sums[:] = 0
    if bits > 0:
        for row in range((number + lanes - 1) // lanes):
            into = sums[row * lanes : min((row + 1) * lanes, number)]
            word, place = row * bits // 64 * lanes, row * bits % 64
            source = words[word : word + len(into)]
            if place + bits <= 64:
                for lane in range(len(into)):
                    into[lane] = np.int64((source[lane] >> np.uint64(place)) & mask)
            else:
                more = words[word + lanes : word + lanes + len(into)]
                for lane in range(len(into)):
                    low = (source[lane] >> np.uint64(place)) | (more[lane] << np.uint64(64 - place))
                    into[lane] = np.int64(low & mask)
    unary = words[lanes * bits :]
    seen = last = low_sum = 0
    for word in range(len(unary)):
        ones = unary[word]
        while ones != 0:
            if seen == number:
                return False
            lowest = ones & (~ones + _ONE)
            last = word * 64 + _TRAILING[(lowest * _MULTIPLIER) >> _PLACE] - seen
            low_sum += sums[seen]
            sums[seen] = (last << bits) + low_sum
            seen += 1
            ones ^= lowest
    return seen == number and last <= limit >> bits


@compiled
def _decode(
    runs: int,
    gap_unary: int,
    length_unary: int,
    gap_bits: int,
    length_bits: int,
    words: Words,
    first: int,
    limit: int,
    out: Integers,
) -> int:
    """The fields of `rice.Group` and the arguments of `decode_group`."""
    count = len(out)
    size = (runs + 63) // 64 * gap_bits + gap_unary
    if runs == count:
        if not _sums(words[:size], gap_bits, limit, out):
            return 1
        for place in range(count):
            out[place] += first + place
    else:
        starts, ends = np.empty(runs, np.int64), np.empty(runs, np.int64)
        if not (_sums(words[:size], gap_bits, limit, starts) and _sums(words[size:], length_bits, count, ends)):
            return 1
        if ends[-1] + runs != count:
            return 2
        place = 0
        for run in range(runs):
            while place <= ends[run] + run:
                out[place] = first + starts[run] + place
                place += 1
    falling = 0
    for place in range(1, count):
        falling += out[place] <= out[place - 1]
    # A sum that went over what an int64 holds is negative here, or the last address is too large.
    return 0 if out[0] >= first and falling == 0 and out[-1] < limit else 3
