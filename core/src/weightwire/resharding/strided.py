"""Bytes of any dtype as integers, and flat tensors seen by regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from weightwire.region_boxes import row_major

_KINDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A dtype by the bytes of an element: a copy between equal ones is bit for bit, whatever the bits mean."""


def as_integers(flat: Tensor, itemsize: int) -> Tensor:
    """A contiguous 1-D tensor as elements of `itemsize` bytes without a meaning."""
    return flat.view(_KINDS[itemsize])


def dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a region of these axes is contiguous."""
    return tuple(strides) == row_major(sizes)


def stripped(sizes: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes that have more than one element."""
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    return tuple(size for size, _ in kept), tuple(stride for _, stride in kept)
