"""Writing scattered elements and reading what was there in one pass: memory comes into the processor's cache once."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch

from weightwire import patching
from weightwire.patching import ReadyPatch, bits
from weightwire_sparse.compiling import compiled
from weightwire_sparse.threads import Threads

_WIDTHS: Final = (torch.uint8, torch.int16, torch.int32, torch.int64)
_threads = Threads(1)


@compiled
def _exchange(memory: Any, offsets: Any, values: Any, before: Any) -> None:
    for number in range(len(offsets)):
        place = offsets[number]
        before[number] = memory[place]
        memory[place] = values[number]


def exchange(patches: Sequence[ReadyPatch]) -> list[ReadyPatch]:
    """See `patching.Exchange`; two threads do half of the elements each."""
    known = [patch for patch in patches if _knows(patch)]
    if known:
        ends = list(accumulate(patch.values.numel() for patch in known))
        middle = bisect(ends, ends[-1] // 2)
        second = _threads.submit(partial(_apply, known[middle:]))
        _apply(known[:middle])
        second.result()
    return [patch for patch in patches if not _knows(patch)]


def _knows(patch: ReadyPatch) -> bool:
    tensors = (patch.memory, patch.offsets, patch.values, patch.room)
    plain = all(tensor is not None and tensor.is_cpu and tensor.stride() == (1,) for tensor in tensors)
    return plain and bits(patch.memory).dtype in _WIDTHS


def _apply(patches: Sequence[ReadyPatch]) -> None:
    for patch in patches:
        memory, values, room = patch.memory, patch.values, patch.room
        assert patch.offsets is not None and room is not None
        flat, new, old = (bits(tensor.detach()).numpy() for tensor in (memory, values, room))
        _exchange(flat, patch.offsets.numpy(), new, old)
        patch.before = room


def install() -> None:
    """Compile, and have the patches of this process applied so."""
    one = torch.zeros(1, dtype=torch.int64)
    for width in _WIDTHS:
        _apply([ReadyPatch(one.to(width), one, one.to(width), room=one.to(width))])
    patching.offer_exchange(exchange)
