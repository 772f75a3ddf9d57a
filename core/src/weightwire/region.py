"""A strided part of a contiguous tensor: which elements of it, and in which order.

Recorded loading, direct resharding, deltas and pulls all speak of regions. A region that is a box is one with the
tensor's own strides; a transposed, split or expanded view is one too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """Elements `offset + sum(i_k * strides[k])` for every index `0 <= i_k < sizes[k]`, in row-major order of the index.

    Attributes:
        offset: In elements of the flat tensor (or of its storage).
        sizes: Extent of each axis.
        strides: In elements; 0 reads one element many times.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements an iteration yields, repeated ones counted each time."""
        return math.prod(self.sizes)
