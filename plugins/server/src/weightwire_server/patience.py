"""How long a client may keep a connection without getting on: uvicorn's HTTP/1.1, with an end to every wait.

uvicorn closes a connection that is idle between two requests. It waits for ever for one that has never sent
anything, that sends its request line byte by byte, that goes on sending a body which has been refused already, or
that does not read its answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0
"""From the start of a connection until its first request is there, up to the body."""

WRITE_SECONDS = 30.0
"""For a client to take an answer that waits for it."""


class _Timer:
    """Calls `act` once, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
        self._loop, self._act = loop, act
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        """Begin to count, if it does not count already."""
        if self._handle is None:
            self._handle = self._loop.call_later(seconds, self._act)

    def stop(self) -> None:
        """Count no more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class PatientProtocol(H11Protocol):
    """One connection; between two requests it may last for uvicorn's `timeout_keep_alive`, whatever trickles in."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to wait for the first request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._request = _Timer(self.loop, self.transport.abort)
        self._answer = _Timer(self.loop, self.transport.abort)
        self._request.start(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._request.stop()
        self._answer.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See whether that was a request."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Start to wait for the next request."""
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._answer.start(WRITE_SECONDS)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._answer.stop()

    def _look(self) -> None:
        cycle: Any = self.cycle  # None before the first request, whatever uvicorn's annotation says
        if cycle is not None and not cycle.response_complete:
            self._request.stop()
        elif not self.transport.is_closing():
            self._request.start(self.timeout_keep_alive)
