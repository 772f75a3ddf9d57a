"""Whole models in shared memory for workers to compute on: written only where nobody looks any more.

Every time a segment is handed out, the write end of a pipe goes with it to each worker, which keeps it open for as long
as anything there still uses that memory, and the kernel closes it for a worker that was killed. So the pipe's end of
file says that a segment is idle, whatever became of links, rounds and processes.
"""

from __future__ import annotations

import os
import select
import time

from weightwire.deadline import Deadline
from weightwire_ipc.memory import MemoryFile

_USUAL, _KEPT = 2, 3
_MOMENT_SECONDS = 1.0
"""After a round that failed a worker may be a little later than the trainer's next one."""


class Export:
    """A segment that holds one version of the weights.

    Attributes:
        file: Its memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.file = MemoryFile(nbytes, what="a copy of the model for workers to adopt")
        self._watched, handed = os.pipe2(os.O_CLOEXEC)
        os.close(handed)
        self._ended = select.poll()
        self._ended.register(self._watched, select.POLLIN)

    def held(self) -> bool:
        """Whether some worker may still look at it."""
        return not self._ended.poll(0)

    def hand_out(self) -> int:
        """A descriptor to send to every worker together with the memory, and to close then."""
        assert not self.held(), "a segment that is looked at is not written"
        ended, handed = os.pipe2(os.O_CLOEXEC)
        os.dup2(ended, self._watched, inheritable=False)
        os.close(ended)
        return handed

    def close(self) -> None:
        """Give up the memory here; workers keep what they have."""
        self.file.close()
        os.close(self._watched)


class Exports:
    """Two segments that are written in turn; a third one while some worker lags behind.

    Args:
        nbytes: Size of each.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._all: list[Export] = []

    def idle(self, deadline: Deadline) -> Export:
        """A segment that nobody looks at; a worker that is about to let go of one is waited for a moment.

        Raises:
            TransferError: There is no memory for another one.
        """
        while len(self._all) < _USUAL:
            self._all.append(Export(self._nbytes))
        until = time.monotonic() + _MOMENT_SECONDS
        while len(self._all) < _KEPT and all(one.held() for one in self._all) and time.monotonic() < until:
            deadline.sleep(_MOMENT_SECONDS / 100)
        export = next((one for one in self._all if not one.held()), None) or Export(self._nbytes)
        # The latest is last, so that the next round takes the one before it.
        self._all = [*(one for one in self._all if one is not export), export]
        while len(self._all) > _KEPT:
            self._all.pop(0).close()
        return export

    def files(self) -> list[MemoryFile]:
        """The memory of all of them."""
        return [one.file for one in self._all]

    def close(self) -> None:
        """Give all of them up."""
        while self._all:
            self._all.pop().close()
