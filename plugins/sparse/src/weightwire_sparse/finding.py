"""Comparing memory with a snapshot of it, bit for bit: the kernels, and putting together what they find."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from weightwire_sparse.changes import Bytes, Changes
from weightwire_sparse.memory import Pool
from weightwire_sparse.pieces import AddressSpace
from weightwire_sparse.rice import choose

KernelChoice = Literal["auto", "numpy", "numba"]

_BLOCK_BYTES = 1 << 20
"""What numpy compares at a time: less loses to the interpreter's lock, more is no longer in the cache when gathered."""


class Kernel(Protocol):
    """One way to compare; used by several threads at once, on memory of their own."""

    name: Literal["numpy", "numba"]
    owned: bool
    """Whether what it yields stays as it is, in memory that is soon used again."""

    def find(self, present: Bytes, snapshot: Bytes, width: int, first: int, pool: Pool) -> Iterator[Changes]:
        """Find the elements whose bits differ.

        Args:
            present: Bytes of elements.
            snapshot: As many, from before.
            width: Bytes of an element.
            first: Address of the first element.
            pool: Gives memory.

        Yields:
            What was found, in ascending order; none of them is empty, and unless they are `owned` each is there until
            the next is asked for.
        """

    def rest(self) -> None:
        """Let go of memory that the next pass over everything need not go on with; nobody compares meanwhile."""


def kernel_for(choice: KernelChoice, widths: Iterable[int] = ()) -> Kernel:
    """The kernel of that name, ready for elements of some widths; "auto" is numba's where it is installed.

    Raises:
        MessageError: Numba was asked for and is not installed, or there is no such kernel.
    """
    if choose(choice) == "numpy":
        return NumpyKernel()
    # Here, not above: it costs half a second and is wanted only by who chose it.
    from weightwire_sparse.finding_numba import NumbaKernel

    return NumbaKernel(widths)


def words(content: Bytes, width: int) -> npt.NDArray[Any]:
    """`content` as unsigned integers, one for each element of `width` bytes; a row of several where that is over 8."""
    if width <= 8:
        return content.view(f"u{width}")
    return content.view(np.uint64).reshape(-1, width // 8)


class NumpyKernel:
    """Compares with numpy, block by block; `torch.nonzero` would take seven times as long."""

    name: Literal["numpy", "numba"] = "numpy"
    owned = False

    def __init__(self) -> None:
        self._scratch = threading.local()

    def find(self, present: Bytes, snapshot: Bytes, width: int, first: int, pool: Pool) -> Iterator[Changes]:
        """See `Kernel`."""
        for start in range(0, len(present), _BLOCK_BYTES):
            stop = start + _BLOCK_BYTES
            now, before = words(present[start:stop], width), words(snapshot[start:stop], width)
            addresses = np.flatnonzero(self._differ(now, before))
            if len(addresses):
                values = now[addresses]
                np.add(addresses, first + start // width, out=addresses)
                yield Changes(addresses, values.reshape(-1).view(np.uint8))

    def rest(self) -> None:
        """See `Kernel`: its mask is small."""

    def _differ(self, now: npt.NDArray[Any], before: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which elements differ; in memory that is used again, since new memory is slow."""
        if now.ndim > 1:
            rows: npt.NDArray[np.bool_] = (now != before).any(axis=1)
            return rows
        mask: npt.NDArray[np.bool_] | None = getattr(self._scratch, "mask", None)
        if mask is None or len(mask) < len(now):
            self._scratch.mask = mask = np.empty(len(now), np.bool_)
        differ: npt.NDArray[np.bool_] = np.not_equal(now, before, out=mask[: len(now)])
        return differ


def empty() -> Changes:
    """No change at all."""
    return Changes(np.empty(0, np.int64), np.empty(0, np.uint8))


def segments(space: AddressSpace) -> list[tuple[int, int, int]]:
    """Each width of elements in bytes, widest first, with its first address and one past its last."""
    widths, counts = np.unique(-space.widths, return_inverse=True)
    numel = np.diff(space.firsts)
    stops = np.cumsum([int(numel[counts == place].sum()) for place in range(len(widths))]).tolist()
    return list(zip((-widths).tolist(), [0, *stops], stops, strict=False))


def without(changes: Changes, space: AddressSpace, numbers: Collection[int]) -> list[Changes]:
    """What `changes` has of pieces other than those of `numbers`; none of it is empty."""
    counts = space.counts(changes.addresses)
    places = np.concatenate(([0], np.cumsum(counts)))
    offsets = changes.value_offsets(space)
    return [
        Changes(
            changes.addresses[places[number] : places[number + 1]],
            changes.values[offsets[number] : offsets[number + 1]],
        )
        for number in np.flatnonzero(counts).tolist()
        if number not in numbers
    ]
