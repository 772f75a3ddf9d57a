"""Who still waits for the calls that are running: one that nobody waits for any more is ended.

A trainer that dies closes its connection, and that is seen here within milliseconds. But a connection can also break
by itself, at a proxy say; the client then repeats the call, and the first one has to go on for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from weightwire.deadline import Deadline
from weightwire.errors import PeerLost

GRACE_SECONDS = 0.25
"""Time for a repetition to come, and for the rendezvous to say more precisely who was lost."""

Key = tuple[str, int]


@dataclass(slots=True)
class _Call:
    deadlines: list[Deadline] = field(default_factory=list)
    present: int = 0


class Callers:
    """Watches the connections of requests; for one event loop."""

    def __init__(self) -> None:
        self._calls: dict[Key, _Call] = {}

    @contextmanager
    def waiting(self, request: Request, deadline: Deadline, *, key: Key | None) -> Iterator[None]:
        """Inside the with statement `request`, whose body has been read, waits for the call that `deadline` is for.

        Once every caller of the same `key` has gone, their deadlines are cancelled with `PeerLost`.

        Args:
            request: The request.
            deadline: Deadline of its call.
            key: Update id and sequence number, where repetitions can be told by them.
        """
        call = _Call() if key is None else self._calls.setdefault(key, _Call())
        call.deadlines.append(deadline)
        call.present += 1
        watcher = asyncio.create_task(_watch(request, call, deadline.what))
        try:
            yield
        finally:
            watcher.cancel()
            call.deadlines.remove(deadline)
            if not call.deadlines and key is not None:
                self._calls.pop(key, None)


async def _watch(request: Request, call: _Call, what: str) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    call.present -= 1
    await asyncio.sleep(GRACE_SECONDS)
    if call.present == 0:
        for deadline in call.deadlines:
            deadline.cancel(PeerLost(f"the trainer's connection closed during {what}"))
