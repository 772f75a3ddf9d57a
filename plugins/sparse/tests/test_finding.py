from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from weightwire.errors import MessageError
from weightwire.layout import Box
from weightwire_sparse import finding, finding_numba, memory
from weightwire_sparse.changes import Changes
from weightwire_sparse.finding import Kernel, NumpyKernel, kernel_for, segments
from weightwire_sparse.finding_numba import NumbaKernel
from weightwire_sparse.memory import Pool, Recorder
from weightwire_sparse.pieces import AddressSpace, Piece

WIDTHS = (1, 2, 4, 8, 16)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "_BLOCK_BYTES", 256)
    monkeypatch.setattr(finding_numba, "_BLOCK_BYTES", 128)


def joined(found: Iterable[Changes]) -> Changes:
    recorder = Recorder(1 << 20, Pool())
    kept = [recorder.kept(changes) for changes in found]
    return memory.joined([changes for changes in kept if changes is not None], Pool())


KERNELS: dict[str, type[Kernel]] = {"numpy": NumpyKernel, "numba": NumbaKernel}


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    width=st.sampled_from(WIDTHS),
    count=st.integers(0, 400),
    before=st.integers(0, 15),
    shift=st.integers(0, 15),
    share=st.sampled_from((0.0, 0.01, 0.3, 1.0)),
    seed=st.integers(0, 2**32 - 1),
)
@example(width=2, count=400, before=0, shift=0, share=1.0, seed=0)
def test_a_kernel_finds_each_element_whose_bits_differ(
    kernel: str, width: int, count: int, before: int, shift: int, share: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    # Any alignment, and something on either side that must stay as it is.
    held = random.integers(0, 256, before + count * width + 16, np.uint8)
    now = random.integers(0, 256, shift + count * width + 16, np.uint8)
    snapshot, present = held[before : before + count * width], now[shift : shift + count * width]
    present[:] = snapshot
    differs = random.random(count) < share
    flips = random.integers(0, width, count), 1 << random.integers(0, 8, count)
    present.reshape(count, width)[differs, flips[0][differs]] ^= flips[1][differs].astype(np.uint8)
    around, content = held.copy(), present.copy()

    found = joined(KERNELS[kernel]().find(present, snapshot, width, 1000, Pool()))

    assert found.addresses.dtype == np.int64 and found.values.dtype == np.uint8
    assert found.addresses.tolist() == (np.flatnonzero(differs) + 1000).tolist()
    assert found.values.tobytes() == content.reshape(count, width)[differs].tobytes()
    assert present.tobytes() == content.tobytes()
    assert held.tobytes() == around.tobytes()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128])
def test_bits_are_compared_not_values(kernel: str, dtype: torch.dtype) -> None:
    def content(*values: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return torch.tensor(values, dtype=dtype).view(torch.uint8).numpy().copy()

    nan, other = content(float("nan")), content(float("nan"))
    other[0] ^= 1  # another payload
    present = np.concatenate([nan, content(-0.0), nan, content(1.0)])
    snapshot = np.concatenate([nan, content(0.0), other, content(1.0)])

    found = joined(KERNELS[kernel]().find(present, snapshot, dtype.itemsize, 0, Pool()))

    assert found.addresses.tolist() == [1, 2]


def test_a_kernel_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_for("auto").name == kernel_for("numba").name == "numba"
    assert kernel_for("numpy").name == "numpy"
    with pytest.raises(MessageError, match="numpy"):
        kernel_for("cupy")  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernel_for("auto").name == "numpy"
    with pytest.raises(MessageError, match=r"weightwire-sparse\[fast\]"):
        kernel_for("numba")


def test_memory_is_given_out_again_once_nobody_refers_to_it() -> None:
    pool = Pool()
    first = pool.room(3 << 20)
    place, kept = first.ctypes.data, torch.from_numpy(first[10:20].view(np.uint16)[1:])
    del first
    second = pool.room(3 << 20)
    assert second.ctypes.data != place
    del kept
    assert pool.room(3 << 20).ctypes.data == place
    assert pool.room(1 << 20).ctypes.data not in (place, second.ctypes.data)  # too large for that
    pool.trim(4 << 20)
    pool.trim(0)
    second[:] = 7  # still there
    assert pool.room(0).size == 0


def space_of(*sizes: tuple[int, torch.dtype]) -> AddressSpace:
    return AddressSpace(0, tuple(Piece(place, Box((0,), (size,)), dtype) for place, (size, dtype) in enumerate(sizes)))


SPACE = space_of((2, torch.complex128), (3, torch.float32), (1, torch.int32), (5, torch.bfloat16), (4, torch.bool))


def changes(values: dict[int, int]) -> Changes:
    """Each byte of an element is its value."""
    addresses = np.array(sorted(values), np.int64)
    widths = np.repeat(SPACE.widths, SPACE.counts(addresses))
    return Changes(addresses, np.repeat(np.array([values[one] for one in addresses.tolist()], np.uint8), widths))


def test_widths_have_consecutive_addresses() -> None:
    assert segments(SPACE) == [(16, 0, 2), (4, 2, 6), (2, 6, 11), (1, 11, 15)]
    assert segments(space_of()) == []


@given(
    st.dictionaries(st.integers(0, SPACE.numel - 1), st.integers(0, 255)),
    st.sets(st.integers(0, len(SPACE.pieces) - 1)),
)
def test_some_pieces_are_left_out(values: dict[int, int], numbers: set[int]) -> None:
    parts = finding.without(changes(values), SPACE, numbers)
    spans = [range(int(SPACE.firsts[number]), int(SPACE.firsts[number + 1])) for number in numbers]
    expected = changes({place: value for place, value in values.items() if not any(place in span for span in spans)})
    found = joined(parts)
    assert all(len(part.addresses) for part in parts)

    assert found.addresses.tolist() == expected.addresses.tolist()
    assert found.values.tobytes() == expected.values.tobytes()


def test_findings_are_put_in_order() -> None:
    found = joined([changes({7: 1, 8: 2}), changes({0: 3}), changes({9: 4, 14: 5})])

    expected = changes({0: 3, 7: 1, 8: 2, 9: 4, 14: 5})
    assert found.addresses.tolist() == expected.addresses.tolist()
    assert found.values.tobytes() == expected.values.tobytes()
    assert joined([]).addresses.size == joined([]).values.size == 0
