"""What lies ready at a producer: references to Ray objects, which nobody looks into here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any


class Shelf:
    """The chunks of the newest round of a link, several in a parcel, and which of them have been read.

    Calls may come in any order: what is of an earlier round than the newest is dropped.
    """

    def __init__(self) -> None:
        self._round: int | None = None
        self._parcels: dict[tuple[int, int], Any] = {}
        self._read: list[tuple[int, int]] = []
        self._changed = asyncio.Event()

    def _turn(self, number: int) -> bool:
        """Whether that round is the newest; what was of an earlier one is dropped."""
        if self._round is None or number > self._round:
            self._round = number
            self._parcels.clear()
            self._read.clear()
        return number == self._round

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, ready: Callable[[], bool], timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not ready():
                    await self._changed.wait()

    def put(self, number: int, worker: int, parcel: int, content: Any) -> None:
        """Lay a parcel of round `number` ready for a worker: `[ordinals of its chunks, references]`."""
        if self._turn(number):
            self._parcels[worker, parcel] = content
            self._tell()

    async def take(self, number: int, worker: int, first: int, timeout: float) -> list[Any]:
        """The parcels from `first` on, as far as they lie ready; waits for that one."""

        def ready() -> bool:
            return self._round == number and (worker, first) in self._parcels

        await self._until(ready, timeout)
        found: list[Any] = []
        while self._round == number and (worker, first + len(found)) in self._parcels:
            found.append(self._parcels[worker, first + len(found)])
        return found

    def read(self, number: int, worker: int, ordinals: Sequence[int]) -> None:
        """A worker has read these chunks. Of a parcel nothing is kept once one of its chunks was read."""
        if number == self._round:
            self._read += [(worker, ordinal) for ordinal in ordinals]
            mine = [(key, content) for key, content in self._parcels.items() if key[0] == worker]
            for key, content in mine:
                if not set(ordinals).isdisjoint(content[0]):
                    del self._parcels[key]
            self._tell()

    async def heard(self, number: int, timeout: float) -> list[tuple[int, int]]:
        """What has been read since this was last asked, as worker and ordinal; waits for something."""
        await self._until(lambda: self._round == number and bool(self._read), timeout)
        if self._round != number:
            return []
        found = list(self._read)
        self._read.clear()
        return found
