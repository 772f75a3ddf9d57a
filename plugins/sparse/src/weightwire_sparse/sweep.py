"""Going over the tensors of one sender in parts of a few megabytes, by several threads."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from itertools import groupby

import numpy as np
from torch import Tensor

from weightwire.source import as_bytes
from weightwire_sparse.changes import Changes
from weightwire_sparse.pieces import AddressSpace
from weightwire_sparse.snapshot import SMALL, Part
from weightwire_sparse.threads import Threads

_TASK_BYTES = 16 << 20
_TASK_ITEMS = 1024
_AHEAD = 2

Work = Callable[[Part], list[Changes]]
Whole = tuple[int, Tensor]
Item = Whole | Part

# Without letting go of the interpreter's lock: a kilobyte is copied before another thread could take it.
_copy = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class Sweep:
    """One pass over some pieces.

    Args:
        space: All pieces.
        threads: Do the work.
        work: Done on each part, from several threads at once.
        grain: Bytes that a piece is cut at multiples of.
        merges: Whether one part may be several small pieces.
        bounded: Whether `add` waits where much is under way, so that tensors made while they are asked for do not
            pile up.
    """

    def __init__(
        self, space: AddressSpace, threads: Threads, work: Work, *, grain: int, merges: bool, bounded: bool = True
    ) -> None:
        self._threads, self._work, self._merges = threads, work, merges
        self._sizes: list[int] = (np.diff(space.firsts) * space.widths).tolist()
        self._widths = space.widths.tolist()
        self._step = max(_TASK_BYTES // grain, 1) * grain
        self._limit = threads.count + _AHEAD if bounded else 0
        self._under_way: deque[Future[list[Changes]]] = deque()
        self._waiting: list[Item] = []
        self._waiting_bytes = 0
        self._sound = True
        self._found: list[Changes] = []

    def add(self, number: int, tensor: Tensor) -> None:
        """Look at a piece; its plain `tensor` must neither change nor go away before `finish`.

        Raises:
            Exception: Whatever the work on an earlier part raised.
        """
        if self._sizes[number] < _TASK_BYTES and tensor.device.type == "cpu":
            self._put(self._sizes[number], (number, tensor))
        else:
            for part in self._parts(number, tensor):
                self._put(len(part.present), part)

    def _put(self, nbytes: int, item: Item) -> None:
        self._waiting.append(item)
        self._waiting_bytes += nbytes
        if self._waiting_bytes >= _TASK_BYTES or len(self._waiting) >= _TASK_ITEMS:
            self.flush()

    def flush(self) -> None:
        """Begin with what was put off until there is enough of it."""
        if not self._waiting:
            return
        self._sound = False  # whatever is raised in between: nobody can tell what was begun
        if self._limit and len(self._under_way) >= self._limit:
            self._collect()
        self._under_way.append(self._threads.submit(partial(self._work_on, self._waiting)))
        self._waiting, self._waiting_bytes = [], 0
        self._sound = True

    def finish(self) -> list[Changes]:
        """Wait for all of it; returns what was found, in no order.

        Raises:
            Exception: What the work on one part raised.
        """
        assert self._sound, "not all of it was begun"
        self.flush()
        while self._under_way:
            self._collect()
        found, self._found = self._found, []
        return found

    def abandon(self) -> None:
        """Begin with no further part, and wait for those under way; what they found or raised does not matter."""
        under_way, self._waiting = [*self._under_way], []
        self._under_way.clear()
        for future in under_way:
            future.cancel()
        wait(under_way)  # our own threads, at work in memory: this ends

    def _collect(self) -> None:
        self._found += self._under_way[0].result()
        self._under_way.popleft()

    def _parts(self, number: int, tensor: Tensor) -> Iterator[Part]:
        content, width = as_bytes(tensor), self._widths[number]
        for start in range(0, self._sizes[number], self._step):
            yield Part(number, start // width, content[start : start + self._step].cpu().numpy())

    def _work_on(self, items: list[Item]) -> list[Changes]:
        return [found for part in self._as_parts(items) for found in self._work(part)]

    def _as_parts(self, items: list[Item]) -> Iterator[Part]:
        """Small pieces of one width that follow each other as one, all others by themselves."""
        for _, group in groupby(enumerate(items), lambda item: self._kind(*item)):
            run = [item for _, item in group]
            if len(run) > 1:
                yield self._merged([item for item in run if isinstance(item, tuple)])
            else:
                item = run[0]
                yield item if isinstance(item, Part) else Part(item[0], 0, as_bytes(item[1]).numpy())

    def _kind(self, position: int, item: Item) -> tuple[int, int]:
        """Equal for those that may be merged."""
        if self._merges and isinstance(item, tuple) and self._sizes[item[0]] < SMALL:
            return item[0] - position, self._widths[item[0]]
        return position, 0

    def _merged(self, run: list[Whole]) -> Part:
        memory = np.empty(sum(self._sizes[number] for number, _ in run), np.uint8)
        place = memory.ctypes.data
        for number, tensor in run:
            _copy(place, tensor.data_ptr(), self._sizes[number])
            place += self._sizes[number]
        return Part(run[0][0], 0, memory)
