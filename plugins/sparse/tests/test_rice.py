from __future__ import annotations

import sys
import tracemalloc
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import MessageError, UpdateRefused
from weightwire_sparse import rice
from weightwire_sparse.compiling import compiled
from weightwire_sparse.pieces import Integers

KERNELS = ("numpy", "numba")
MOST = rice.MOST_ADDRESSES

randoms = st.randoms(use_true_random=False)


def joined(coded: rice.Coded) -> rice.Words:
    return np.concatenate((*coded.groups, np.zeros(0, np.uint64)))


def encoded(addresses: Integers) -> tuple[rice.Table, rice.Words]:
    """What both kernels write, which is the same."""
    numpy = rice.encode(addresses, kernels="numpy")
    numba = rice.encode(addresses, kernels="numba", threads=2)
    assert numba.table.tobytes() == numpy.table.tobytes()
    assert joined(numba).tobytes() == joined(numpy).tobytes()
    return numpy.table, joined(numpy)


def check_round_trip(addresses: Integers, limit: int = MOST) -> int:
    """Both kernels write the same and read it; returns how many bytes it takes."""
    table, words = encoded(addresses)
    for kernels in KERNELS:
        assert np.array_equal(rice.decode(table, words, limit=limit, kernels=kernels, threads=2), addresses)
    return table.nbytes + words.nbytes


def random_addresses(random: Random, most: int) -> Integers:
    """Clusters, single ones and gaps of any size, `most` at most."""
    found: list[int] = []
    address = random.choice([0, random.randrange(1 << random.randint(1, 61))])
    while len(found) < most and address < MOST and random.random() < 0.98:
        length = random.choice([1, 1, random.randint(1, 40)])
        found += range(address, min(address + length, MOST))
        address = found[-1] + 1 + random.randrange(1 << random.choice([1, 7, random.randint(1, 61)]))
    return np.array(found[:most], np.int64)


@given(randoms, st.integers(0, 600))
def test_both_kernels_write_the_same_and_read_each_other(random: Random, most: int) -> None:
    addresses = random_addresses(random, most)
    check_round_trip(addresses)
    if len(addresses):
        check_round_trip(addresses, limit=int(addresses[-1]) + 1)


@pytest.mark.parametrize(
    "addresses",
    [
        [],
        [0],
        [MOST - 1],
        [0, MOST - 1],
        [0, 1, MOST - 2, MOST - 1],
        range(5, 5 + rice.GROUP),
        range(0, 1 << 62, 1 << 54),
    ],
    ids=lambda addresses: str(len(addresses)),
)
def test_extremes(addresses: Any) -> None:
    check_round_trip(np.array(addresses, np.int64))


@pytest.mark.parametrize("count", [rice.GROUP - 1, rice.GROUP, rice.GROUP + 1, 2 * rice.GROUP + 77])
@pytest.mark.parametrize("mean", [2, 100, 1 << 40])
def test_groups(count: int, mean: int) -> None:
    gaps = np.random.default_rng(count).integers(1, 2 * mean, count)
    check_round_trip(np.cumsum(gaps))


@pytest.mark.parametrize(("fraction", "most"), [(0.01, 1.02), (0.001, 1.46)])
def test_random_addresses_cost_little_more_than_their_entropy(fraction: float, most: float) -> None:
    addresses = np.cumsum(np.random.default_rng(0).geometric(fraction, 200_000)) - 1
    assert check_round_trip(addresses) <= most * len(addresses)


def test_whole_rows_cost_next_to_nothing() -> None:
    rows = np.flatnonzero(np.random.default_rng(0).random(40_000) < 0.01)
    addresses = (rows[:, None] * 576 + np.arange(576)).reshape(-1)
    assert check_round_trip(addresses) <= 0.02 * len(addresses)


def outcome(table: rice.Table, words: rice.Words, limit: int, kernels: str) -> Integers | UpdateRefused:
    try:
        return rice.decode(table, words, limit=limit, kernels=kernels)
    except UpdateRefused as error:
        return error


def check_harmless(table: rice.Table, words: rice.Words, limit: int) -> None:
    """Both kernels refuse, or both read the same addresses, and those are ascending and in range."""
    numpy, numba = (outcome(table, words, limit, kernels) for kernels in KERNELS)
    if isinstance(numpy, UpdateRefused) or isinstance(numba, UpdateRefused):
        assert str(numpy) == str(numba)
        assert "malformed" in str(numpy) and isinstance(numpy, UpdateRefused) and numpy.transport == "sparse_nccl"
        return
    assert np.array_equal(numpy, numba)
    assert (np.diff(numpy, prepend=-1) > 0).all() and (numpy < limit).all()


HOSTILE = (0, 1, 2, 62, 63, 64, 65, 255, 65_535, 65_536, 65_537, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


@given(randoms, st.integers(1, 300))
def test_no_table_and_no_words_do_harm(random: Random, most: int) -> None:
    addresses = random_addresses(random, most)
    table, words = encoded(addresses)
    limit = random.choice([MOST, int(addresses[-1]) + 1, random.randint(0, MOST)]) if len(addresses) else 0
    for _ in range(random.randint(1, 3)):
        wrong = random.choice(["field", "bit", "bit", "word", "more", "fewer", "groups"])
        if wrong == "field" and len(table):
            name = random.choice([name for name in table.dtype.names or () if name != "unused"])
            near = int(table[name][0]) + random.choice([-1, 1])
            table[name][0] = random.choice([*HOSTILE, near]) & np.iinfo(table.dtype[name]).max
        elif wrong == "bit" and len(words):
            words[random.randrange(len(words))] ^= np.uint64(1 << random.randrange(64))
        elif wrong == "word" and len(words):
            words[random.randrange(len(words))] = random.choice(HOSTILE)
        elif wrong == "more":
            words = np.append(words, np.uint64(random.choice(HOSTILE)))
        elif wrong == "fewer":
            words = words[: random.randint(0, len(words))].copy()
        elif wrong == "groups":
            table = np.concatenate((table, table))
    check_harmless(table, words, limit)


@given(randoms)
def test_random_words_do_no_harm(random: Random) -> None:
    """A table that fits, so that the words themselves are read."""
    count = random.choice([1, 63, 64, 65, random.randint(1, 2000)])
    runs = random.choice([count, random.randint(1, count)])
    gap_bits, length_bits = random.randint(0, 62), random.randint(0, 16) * (runs < count)
    gap_unary, length_unary = random.randint(1, runs), random.randint(1, runs) * (runs < count)
    table = np.zeros(1, rice.ENTRY)
    table[0] = (random.randrange(100), count, runs, gap_unary, length_unary, gap_bits, length_bits, (0, 0, 0))
    low = [-(-runs // 64) * bits for bits in (gap_bits, length_bits)]
    words = np.array([random.getrandbits(random.choice([0, 2, 64])) for _ in range(sum(low))], np.uint64)
    streams = np.split(words, [low[0]])
    # As many ones as there have to be, but anywhere.
    ones = [np.zeros(64 * unary, np.bool_) for unary in (gap_unary, length_unary)]
    for place in (ones[0], ones[1][: 64 * length_unary]):
        place[random.sample(range(len(place)), min(runs, len(place)))] = True
    unary = [np.packbits(place, bitorder="little").view(np.uint64) for place in ones]
    words = np.concatenate((streams[0], unary[0], streams[1], unary[1]))
    check_harmless(table, words, random.choice([MOST, 1 << random.randint(8, 61)]))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_table_is_refused_before_anything_is_allocated_for_it(kernels: str) -> None:
    rice.warm(kernels)
    table = np.zeros(1000, rice.ENTRY)
    table["count"], table["runs"], table["gap_unary"], table["length_unary"] = rice.GROUP, 1, 1, 1
    words = np.ones(2000, np.uint64)
    tracemalloc.start()
    try:
        with pytest.raises(UpdateRefused, match="malformed"):
            rice.decode(table, words, limit=1_000_000, kernels=kernels)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [rice.choose(which) for which in ("auto", "numba", "numpy")] == ["numba", "numba", "numpy"]
    with pytest.raises(MessageError, match="not 'fortran'"):
        rice.choose("fortran")
    monkeypatch.setitem(sys.modules, "numba", None)  # what Python itself takes for "there is none"
    assert [rice.choose(which) for which in ("auto", "numpy")] == ["numpy", "numpy"]
    with pytest.raises(MessageError, match=r"pip install 'weightwire-sparse\[fast\]'"):
        rice.choose("numba")


def test_kernels_compile_where_nothing_can_be_kept() -> None:
    """Numba has no place to keep code that came from no file, as from a file whose folders are all read-only."""
    namespace: dict[str, Any] = {}
    exec("def double(number): return 2 * number", namespace)
    assert compiled(namespace["double"])(4) == 8
