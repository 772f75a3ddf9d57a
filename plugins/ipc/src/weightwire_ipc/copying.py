"""Copies within the memory of this process, as few as the places allow.

Neighbours on both sides are copied by one call: 20,000 small tensors cost more as calls than as bytes, and one copy of
hundreds of megabytes is faster than hundreds of small ones, since the C library writes past the caches then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from weightwire.deadline import Deadline

Span = tuple[int, int, int]
"""Target address, source address, bytes."""


def spans(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], *, padding: int = 0) -> list[Span]:
    """The copies that bring `sizes` bytes from each of `sources` to its target, in as few calls as possible.

    Args:
        targets: Addresses to copy to.
        sources: Addresses to copy from.
        sizes: Bytes of each.
        padding: Up to that many bytes between two neighbours belong to nobody, on both sides, and may be copied along.
    """
    target, source, size = (torch.tensor(one, dtype=torch.int64) for one in (targets, sources, sizes))
    some = size > 0
    target, source, size = target[some], source[some], size[some]
    if not len(size):
        return []
    gap = target[1:] - target[:-1] - size[:-1]
    joined = (gap >= 0) & (gap <= padding) & (target.diff() == source.diff())
    first = torch.cat([torch.tensor([0]), (~joined).nonzero().flatten() + 1])
    last = torch.cat([first[1:] - 1, torch.tensor([len(size) - 1])])
    length = target[last] + size[last] - target[first]
    return list(zip(target[first].tolist(), source[first].tolist(), length.tolist(), strict=True))


def copy_spans(copies: Iterable[Span], deadline: Deadline) -> None:
    """Copy; every span must be memory of this process, and stay so meanwhile.

    Raises:
        BaseException: What `deadline` was cancelled with.
    """
    alone = torch.get_num_threads() == 1
    for target, source, nbytes in copies:
        deadline.check()
        if alone:
            ctypes.memmove(target, source, nbytes)
        else:
            bytes_at(target, nbytes).copy_(bytes_at(source, nbytes))


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between 1-D uint8 tensors of one length, on whatever devices."""
    if target.device.type == source.device.type == "cpu" and torch.get_num_threads() == 1:
        # What torch copies with stays in the caches, the C library's does not where there is much of it.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
    else:
        target.copy_(source)


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """Memory of this process as a 1-D uint8 tensor, which does not keep it."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
