"""Writing scattered elements and reading what was there in one pass: memory comes into the processor's cache once."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, TypeVar, cast

import numba
import torch

from weightwire import patching
from weightwire.patching import ReadyPatch
from weightwire_sparse.threads import Threads

_Function = TypeVar("_Function", bound=Callable[..., Any])
_WIDTHS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_threads = Threads(1)


def _compiled(function: _Function) -> _Function:
    return cast(_Function, numba.njit(nogil=True, cache=True)(function))


@_compiled
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
    return plain and patch.memory.element_size() in _WIDTHS


def _apply(patches: Sequence[ReadyPatch]) -> None:
    for patch in patches:
        memory, values, room = patch.memory, patch.values, patch.room
        assert patch.offsets is not None and room is not None
        width = _WIDTHS[memory.element_size()]
        flat, new, old = (tensor.detach().view(width).numpy() for tensor in (memory, values, room))
        _exchange(flat, patch.offsets.numpy(), new, old)
        patch.before = room


def install() -> None:
    """Compile, and have the patches of this process applied so."""
    one = torch.zeros(1, dtype=torch.int64)
    for width in _WIDTHS.values():
        _apply([ReadyPatch(one.to(width), one, one.to(width), room=one.to(width))])
    patching.offer_exchange(exchange)
