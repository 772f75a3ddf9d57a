"""The Ray actor beside a trainer rank: the door at which workers ask.

A trainer rank may be any process, an actor or not, and is busy while it trains and sends. So the requests of workers
go to its producer, which looks at each and refuses what is not that rank's to give; the rank collects what was taken.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from weightwire.errors import MessageError, WeightwireError
from weightwire_rdt.cluster import answer_of
from weightwire_rdt.declaration import Declaration


class _Link:
    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.reader = declaration.reader()
        self.requests: dict[int, str] = {}


class Producer:
    """What runs in the actor. Its methods return JSON types; an error is an answer too.

    Methods run in threads, as many as there are workers and some more.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._links: dict[str, _Link] = {}

    def ping(self) -> bool:
        """Say that it is there."""
        return True

    def open(self, link: str, declaration: dict[str, Any]) -> dict[str, Any]:
        """Take requests for a link; those for earlier ones are forgotten.

        Args:
            link: Its name.
            declaration: As of `Declaration.to_json`.
        """
        try:
            opened = _Link(Declaration.from_json(declaration))
        except WeightwireError as error:
            return answer_of(error)
        with self._condition:
            self._links = {link: opened}
            self._condition.notify_all()
        return {}

    def request(self, link: str, worker: int, text: str, timeout: float) -> dict[str, Any]:
        """Take the request of a worker rank, as of `write_request`; waits until the link is open here.

        Asked again with the same text it answers the same.
        """
        try:
            opened = self._wait_for(link, timeout)
            count = opened.declaration.workers
            if not (isinstance(worker, int) and 0 <= worker < count):
                raise MessageError(f"there is no worker rank {worker!r}: there are {count}")
            opened.reader.read(text, worker)
            with self._condition:
                if opened.requests.get(worker, text) != text:
                    raise MessageError(f"worker rank {worker} has asked for something else on this link")
                opened.requests[worker] = text
                self._condition.notify_all()
        except WeightwireError as error:
            return answer_of(error)
        return {}

    def _wait_for(self, link: str, timeout: float) -> _Link:
        until = time.monotonic() + timeout
        with self._condition:
            while link not in self._links:
                if (left := until - time.monotonic()) <= 0:
                    raise MessageError("this trainer rank has no such link")
                self._condition.wait(left)
            return self._links[link]

    def requests(self, link: str, timeout: float) -> dict[str, Any]:
        """Those of all workers, `{"requests": {rank: text}}`, or of those that have asked after `timeout` seconds."""
        until = time.monotonic() + timeout
        with self._condition:
            opened = self._links[link]
            while len(opened.requests) < opened.declaration.workers and (left := until - time.monotonic()) > 0:
                self._condition.wait(left)
            return {"requests": dict(opened.requests)}
