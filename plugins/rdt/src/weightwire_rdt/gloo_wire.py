"""Chunks over a gloo group of the ranks: both ends know from the requests what comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from weightwire.collective import Communicator, Handle
from weightwire.deadline import Deadline
from weightwire.packing import Pending
from weightwire_rdt.outlet import Key
from weightwire_rdt.pulling import Chunk

_PAUSE: Final = 0.0005


class GlooServing:
    """A trainer rank's end.

    Args:
        communicator: The group; None where nobody asked for anything.
        ranks: Of each worker rank its rank in the group.

    Attributes:
        ahead: See `Outlet`.
        goes_on: See `Outlet`. What a stopped worker has not taken cannot be taken back.
    """

    ahead = 1
    goes_on = False

    def __init__(self, communicator: Communicator | None, ranks: Mapping[int, int]) -> None:
        self._communicator = communicator
        self._ranks = ranks
        self._next = dict.fromkeys(ranks, 0)
        self._sent: dict[Key, Handle] = {}

    def begin_round(self, number: int) -> None:
        """A round begins."""
        self._sent.clear()
        self._next = dict.fromkeys(self._ranks, 0)
        if self._communicator is not None:
            self._communicator.begin_round()

    def end_round(self) -> None:
        """It is over, however it ended."""

    def send(self, buffers: Sequence[Tensor], to: Sequence[int], *, deadline: Deadline) -> Pending:
        """Send the next chunk to the worker in `to`; blocks while its window is full."""
        (worker,) = to
        assert self._communicator is not None
        handle = self._communicator.send(buffers, [self._ranks[worker]], deadline=deadline)
        self._sent[worker, self._next[worker]] = handle
        self._next[worker] += 1
        return handle

    def unread(self) -> set[Key]:
        """The chunks that have not left."""
        self._sent = {key: handle for key, handle in self._sent.items() if not handle.done}
        return set(self._sent)

    def wait(self, keys: set[Key], deadline: Deadline) -> None:
        """Wait until these have left."""
        for key in sorted(keys & self._sent.keys()):
            self._sent.pop(key).wait(deadline)

    def flush(self, deadline: Deadline) -> None:
        """Wait until everything has left."""
        if self._communicator is not None:
            self._communicator.flush(deadline)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group; one that failed is parked with what it may still send."""
        self._sent.clear()
        if self._communicator is not None:
            self._communicator.leave(error=error)


class _Arriving:
    """Chunks on their way."""

    def __init__(self, handles: Sequence[Handle], deadline: Deadline) -> None:
        self._handles = handles
        self._deadline = deadline

    @property
    def done(self) -> bool:
        """Waits until they are here: gloo's operations end in order, and who waits hears of a peer that is gone."""
        for handle in self._handles:
            handle.wait(self._deadline)
        return True


class GlooReading:
    """A worker's end.

    Args:
        communicator: The group; None where nothing was asked for.
        ranks: Of each trainer rank its rank in the group.

    Attributes:
        divides: See `Inbound`.
    """

    divides = False

    def __init__(self, communicator: Communicator | None, ranks: Mapping[int, int]) -> None:
        self._communicator = communicator
        self._ranks = ranks

    def begin_round(self, number: int) -> None:
        """A round begins."""
        if self._communicator is not None:
            self._communicator.begin_round()

    def ready(self, owner: int, ordinal: int) -> bool:
        """Always: a chunk may be waited for before it is sent, one after the other."""
        return True

    def receive(self, chunks: Sequence[Chunk], owner: int, deadline: Deadline) -> _Arriving:
        """Have the next chunks written into their buffers."""
        communicator, source = self._communicator, self._ranks[owner]
        assert communicator is not None
        handles = [communicator.receive(chunk.buffers, source, deadline=deadline) for chunk in chunks]
        return _Arriving(handles, deadline)

    def pause(self, deadline: Deadline, owners: Sequence[int]) -> None:
        """Wait a moment."""
        deadline.sleep(_PAUSE)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group; one that failed is parked with the buffers that it may still write to."""
        if self._communicator is not None:
            self._communicator.leave(error=error)
