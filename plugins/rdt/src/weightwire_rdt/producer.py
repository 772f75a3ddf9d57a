"""The Ray actor beside a trainer rank: the door at which workers ask.

A trainer rank may be any process, an actor or not, and is busy while it trains and sends. So the requests of workers
go to its producer, which looks at each and refuses what is not that rank's to give; the rank collects what was taken.
One producer serves a process for as long as it lives, link after link.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from weightwire.errors import MessageError, WeightwireError
from weightwire_rdt.cluster import answer_of
from weightwire_rdt.requests import Holding
from weightwire_rdt.shelf import Shelf


class _Link:
    def __init__(self, holding: Holding, workers: int) -> None:
        self.holding = holding
        self.workers = workers
        self.requests: dict[int, str] = {}
        self.shelf = Shelf()
        self.complete = asyncio.Event()


class Producer:
    """What runs in the actor. Its methods return JSON types; an error is an answer too."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    async def open(self, link: str, holding: dict[str, Any], workers: int) -> dict[str, Any]:
        """Take requests for a link.

        Args:
            link: Its name.
            holding: As of `Holding.to_json`.
            workers: How many worker ranks will ask.
        """
        try:
            self._links[link] = _Link(Holding.from_json(holding), workers)
        except WeightwireError as error:
            return answer_of(error)
        return {}

    async def close(self, link: str) -> None:
        """Forget a link."""
        self._links.pop(link, None)

    async def request(self, link: str, worker: int, text: str) -> dict[str, Any]:
        """Take the request of a worker rank. Asked again with the same text it answers the same."""
        try:
            self._take(link, worker, text)
        except WeightwireError as error:
            return answer_of(error)
        return {}

    def _take(self, link: str, worker: int, text: str) -> None:
        opened = self._opened(link)
        if type(worker) is not int or not 0 <= worker < opened.workers:
            raise MessageError(f"there is no worker rank {worker!r}: there are {opened.workers}")
        opened.holding.read(text, worker)
        if opened.requests.setdefault(worker, text) != text:
            raise MessageError(f"worker rank {worker} has asked for something else on this link")
        if len(opened.requests) == opened.workers:
            opened.complete.set()

    def _opened(self, link: Any) -> _Link:
        opened = self._links.get(link) if isinstance(link, str) else None
        if opened is None:
            raise MessageError(f"this trainer rank has no link {link!r}")
        return opened

    async def requests(self, link: str, timeout: float) -> dict[str, Any]:
        """Those of all workers, `{"requests": {rank: text}}`, or of those that have asked after `timeout` seconds."""
        try:
            opened = self._opened(link)
        except WeightwireError as error:
            return answer_of(error)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(opened.complete.wait(), timeout)
        return {"requests": dict(opened.requests)}

    # Chunks, where Ray carries them: see `Shelf`

    async def shelve(self, link: str, number: int, worker: int, parcel: int, content: list[Any]) -> None:
        """Lay a parcel ready: the ordinals of its chunks, and references in a list, so that Ray does not fetch them."""
        if link in self._links:
            self._links[link].shelf.put(number, worker, parcel, content)

    async def take(self, link: str, number: int, worker: int, first: int, timeout: float) -> dict[str, Any]:
        """`{"parcels": those from `first` on}`; none after `timeout` seconds."""
        try:
            return {"parcels": await self._opened(link).shelf.take(number, worker, first, timeout)}
        except WeightwireError as error:
            return answer_of(error)

    async def read(self, link: str, number: int, worker: int, ordinals: list[int]) -> None:
        """A worker has read these."""
        if link in self._links:
            self._links[link].shelf.read(number, worker, ordinals)

    async def heard(self, link: str, number: int, timeout: float) -> dict[str, Any]:
        """`{"read": [(worker, ordinal), ...]}`, what has been read since the last call; none after `timeout`."""
        try:
            return {"read": await self._opened(link).shelf.heard(number, timeout)}
        except WeightwireError as error:
            return answer_of(error)
