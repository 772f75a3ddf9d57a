"""Positions as Rice-coded gaps, in groups that stand alone.

Ascending addresses are cut into groups of `GROUP`; the last one may be shorter. A group is a list of runs of
neighbours, coded as one stream of the gaps before its runs (the first gap is zero: the table has the group's first
address) and one of the lengths of its runs, less one. Where that is shorter, every address is a run of its own, and
there are no lengths.

A stream of n values has a parameter, its `bits`, and is two parts of whole little-endian 64-bit words:

- the `bits` low bits of each value. With lanes = ceil(n / 64), value i is in row i // lanes, lane i % lanes. The 64
  values of a lane are a string of 64 * `bits` bits, lowest first, of which word w lies at w * lanes + lane: so a row
  is packed by a few operations on contiguous words, whether numpy's or a processor's vectors.
- the rest of each value, value >> `bits`, as so many zeros and a one, lowest bit first.

numpy's kernels are here and compiled ones in `rice_numba`; they write the same bytes and read each other's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from weightwire.errors import MessageError, UpdateRefused
from weightwire_sparse.pieces import Integers

Words = npt.NDArray[np.uint64]
Table = npt.NDArray[np.void]

GROUP = 65_536
MOST_ADDRESSES = 1 << 62  # sums of two gaps and an address still show in an int64 that they are too large

ENTRY = np.dtype(
    [
        ("first", "<u8"),  # the group's first address
        ("count", "<u4"),  # addresses
        ("runs", "<u4"),  # values in each stream; as many as addresses: there are no lengths
        ("gap_unary", "<u4"),  # words of unary bits
        ("length_unary", "<u4"),
        ("gap_bits", "u1"),
        ("length_bits", "u1"),
        ("unused", "<u2", (3,)),
    ]
)

FAULTS = (
    "",
    "a group's unary bits do not end as many values as it has",
    "a group's runs are not as long as it has addresses",
    "addresses are out of range or do not ascend",
)


class Group(NamedTuple):
    """A coded group: the columns of its table entry from `runs` on, and its words."""

    runs: int
    gap_unary: int
    length_unary: int
    gap_bits: int
    length_bits: int
    words: Words


class Kernels(Protocol):
    """What codes one group."""

    def encode_group(self, addresses: Integers) -> Group:
        """Code 1 to `GROUP` addresses."""

    def decode_group(self, group: Group, first: int, limit: int, out: Integers) -> int:
        """Write as many addresses as `out` has room for; the number of what is wrong in `FAULTS`, or 0.

        The group has passed `_check_table`: its words are as many as its other fields say.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """Coded addresses.

    Attributes:
        table: `ENTRY` per group.
        groups: The words of each group; on the wire they follow each other.
    """

    table: Table
    groups: tuple[Words, ...]

    @property
    def words(self) -> int:
        """How many words the groups have."""
        return sum(map(len, self.groups))


def choose(which: str) -> str:
    """Which kernels run here: `"numba"` or `"numpy"`.

    Args:
        which: One of them, or `"auto"`: compiled ones where numba is installed.

    Raises:
        MessageError: There are no such kernels, or numba is asked for and not installed.
    """
    if which not in ("auto", "numpy", "numba"):
        raise MessageError(f"kernels are 'auto', 'numpy' or 'numba', not {which!r}", transport="sparse_nccl")
    installed = importlib.util.find_spec("numba") is not None
    if which == "numba" and not installed:
        message = "kernels='numba' needs numba: pip install 'weightwire-sparse[fast]', or kernels='auto'"
        raise MessageError(message, transport="sparse_nccl")
    return "numba" if installed and which != "numpy" else "numpy"


def warm(kernels: str) -> None:
    """Compile what is to be compiled, which takes seconds the first time on a machine, before time matters."""
    coded = encode(np.arange(3), kernels=kernels)
    decode(coded.table, coded.groups[0], limit=3, kernels=kernels)


def malformed(what: str) -> UpdateRefused:
    """The error for a payload that cannot have been built by `payload.build`."""
    message = f"a malformed delta: {what}; nothing of it was written"
    return UpdateRefused(message, transport="sparse_nccl")


def encode(addresses: Integers, *, kernels: str, threads: int = 1) -> Coded:
    """Code ascending distinct addresses from 0 to below `MOST_ADDRESSES`.

    Args:
        addresses: int64, any number, contiguous.
        kernels: What `choose` answered.
        threads: How many groups are coded at a time; numpy's kernels, which would wait for each other, use one.
    """
    encode_group = _kernels(kernels).encode_group
    starts = range(0, len(addresses), GROUP)
    groups = _each(lambda start: encode_group(addresses[start : start + GROUP]), starts, kernels, threads)
    table = np.zeros(len(groups), ENTRY)
    table["first"] = addresses[::GROUP]
    table["count"] = [min(GROUP, len(addresses) - start) for start in starts]
    for number, name in enumerate(Group._fields[:-1]):
        table[name] = [group[number] for group in groups]
    return Coded(table, tuple(group.words for group in groups))


def decode(
    table: Table,
    words: Words,
    *,
    limit: int,
    kernels: str,
    threads: int = 1,
    room: Callable[[int], Integers] = lambda count: np.empty(count, np.int64),
) -> Integers:
    """The addresses, all checked: ascending, distinct, below `limit`, and no more than that.

    Args:
        table: `ENTRY` per group.
        words: Of all groups, one after the other; aligned and contiguous.
        limit: One past the last address that there can be, at most `MOST_ADDRESSES`.
        kernels: What `choose` answered.
        threads: As for `encode`.
        room: Gives memory for so many addresses, int64; new memory by default.

    Raises:
        UpdateRefused: Not what `encode` writes. Until the table has been checked nothing is allocated for it.
    """
    assert 0 <= limit <= MOST_ADDRESSES
    ends = np.cumsum(_check_table(table, len(words), limit))
    out = room(int(table["count"].sum(dtype=np.int64)))
    decode_group = _kernels(kernels).decode_group

    def decode_one(number: int) -> None:
        first, _, runs, gap_unary, length_unary, gap_bits, length_bits, _ = table[number].tolist()
        start = int(ends[number - 1]) if number else 0
        group = Group(runs, gap_unary, length_unary, gap_bits, length_bits, words[start : int(ends[number])])
        fault = decode_group(group, first, limit, out[number * GROUP : (number + 1) * GROUP])
        if fault:
            raise malformed(FAULTS[fault])

    _each(decode_one, range(len(table)), kernels, threads)
    if (out[GROUP::GROUP] <= out[GROUP - 1 : -1 : GROUP]).any():
        raise malformed("groups overlap")
    return out


def _check_table(table: Table, words: int, limit: int) -> Integers:
    """The words of each group; raises unless every field is possible and the words are as many as there are."""
    count, runs, gap_unary, length_unary, gap_bits, length_bits = (
        table[name].astype(np.int64)
        for name in ENTRY.names[1:7]  # type: ignore[index] # it has names
    )
    single = runs == count
    refused = {
        "a group has more or fewer addresses than fit": (count < 1) | (count > GROUP),
        "a group before the last is not full": count[:-1] != GROUP,
        "a first address is out of range": table["first"] >= limit,
        "a group has more or fewer runs than addresses": (runs < 1) | (runs > count),
        "a Rice parameter is too large": (gap_bits > 62) | (length_bits > 16),
        "gaps have more or fewer unary bits than they can": (gap_unary < 1) | (gap_unary > runs),
        "lengths have more or fewer unary bits than they can": np.where(
            single, length_unary + length_bits > 0, (length_unary < 1) | (length_unary > runs)
        ),
        "unused fields are used": table["unused"].any(axis=1),
    }
    for what, found in refused.items():
        if found.any():
            raise malformed(what)
    sizes: Integers = -(-runs // 64) * (gap_bits + length_bits) + gap_unary + length_unary
    if int(count.sum()) > limit:
        raise malformed(f"it has {count.sum()} addresses of {limit}")
    if int(sizes.sum()) != words:
        raise malformed(f"its groups have {sizes.sum()} words, and {words} came")
    return sizes


def _kernels(name: str) -> Kernels:
    """Those of that name, imported at first use."""
    module = {"numpy": "weightwire_sparse.rice_numpy", "numba": "weightwire_sparse.rice_numba"}[name]
    return cast(Kernels, importlib.import_module(module))


def _each(function: Callable[[int], Any], items: Iterable[int], kernels: str, threads: int) -> list[Any]:
    """What `function` returns for each item, in order, computed by so many threads."""
    if threads == 1 or kernels == "numpy":
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(function, items))
