"""What has changed on one sender: addresses and the bytes that are there now."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire_sparse.pieces import AddressSpace, Integers

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Elements and their new values.

    Attributes:
        addresses: int64, ascending, no two alike, in the sender's `AddressSpace`.
        values: uint8: the elements' bytes in the order of their addresses; as many as their widths sum up to.
    """

    addresses: Integers
    values: Bytes

    def value_offsets(self, space: AddressSpace) -> Integers:
        """Where the values of each piece start in `values`, and where the last ones end: one more than pieces."""
        return np.concatenate(([0], np.cumsum(space.counts(self.addresses) * space.widths)))
