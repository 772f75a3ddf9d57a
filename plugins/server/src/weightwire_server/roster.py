"""The front's end of its ranks' lifelines: who is there, who is not and why."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weightwire.errors import WeightwireError, describe
from weightwire_server.lifeline import Asking
from weightwire_server.private_directory import PrivateDirectory

_HELLO_SECONDS = 5.0
_PARTING_SECONDS = 1.0


@dataclass(slots=True)
class Member:
    """One rank that has joined.

    Attributes:
        pid: Its process.
        ready: Whether it takes calls.
        blocked: Why its weights may not be read, if so.
    """

    pid: int
    ready: bool = False
    blocked: str | None = None


class Roster:
    """Takes ranks in; for one event loop.

    Args:
        directory: Where front and ranks meet.
        world_size: Ranks of the server.
        changed: Called with a rank that has joined, is ready, is blocked or not any more, or has left.
        leave: Answers a rank that asks before a commit; what it raises is the refusal.
    """

    def __init__(
        self,
        directory: PrivateDirectory,
        world_size: int,
        *,
        changed: Callable[[int], None],
        leave: Callable[[int, Asking], Awaitable[None]],
    ) -> None:
        self.members: dict[int, Member] = {}
        self._directory = directory
        self._world_size = world_size
        self._changed = changed
        self._leave = leave
        self._absent = {rank: f"rank {rank} has not joined yet" for rank in range(world_size)}
        self._served: set[int] = set()
        self._explained: set[int] = set()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen."""
        self._secret = self._directory.secret()
        self._server = await asyncio.start_unix_server(self._serve, self._directory.front)

    async def close(self) -> None:
        """Let go of every rank."""
        if self._server is not None:
            self._server.close()
        serving = dict(self._connections)
        for writer in serving.values():
            writer.close()
        if serving:
            await asyncio.wait(serving, timeout=_PARTING_SECONDS)

    def ready(self, rank: int) -> bool:
        """Whether a rank takes calls."""
        return rank in self.members and self.members[rank].ready

    def absent(self) -> dict[int, str]:
        """The ranks that take no calls, and why."""
        return {rank: self.why(rank) for rank in range(self._world_size) if not self.ready(rank)}

    def why(self, rank: int) -> str:
        """Why a rank takes no calls."""
        if (member := self.members.get(rank)) is not None:
            return f"rank {rank} (pid {member.pid}) is loading its model"
        return self._absent[rank]

    def explained(self, rank: int) -> bool:
        """Whether it is known how a rank's process ended."""
        return rank not in self.members and rank in self._explained

    def explain(self, rank: int, words: str) -> bool:
        """Say more precisely why a rank is not there; returns whether it has been ready before it ended."""
        self._absent[rank] = words
        self._explained.add(rank)
        served = rank in self._served
        self._served.discard(rank)
        return served

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        rank: int | None = None
        try:
            rank = await self._take(reader, writer)
            while rank is not None and (line := await reader.readline()):
                self._hear(rank, json.loads(line), writer)
        except (ConnectionError, ValueError):
            return  # whoever it was, nothing more is heard
        finally:
            del self._connections[task]
            writer.close()
            if rank is not None:
                pid = self.members.pop(rank).pid
                if rank not in self._explained:
                    self._absent[rank] = f"rank {rank} (pid {pid}) is gone"
                self._changed(rank)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), _HELLO_SECONDS))["join"]
            rank, pid = int(hello["rank"]), int(hello["pid"])
            refusal = self._refusal(hello, rank)
        except (TimeoutError, KeyError, TypeError, ValueError):
            return None
        if refusal is not None:
            _send(writer, refused=refusal)
            return None
        self.members[rank] = Member(pid)
        self._explained.discard(rank)
        _send(writer, welcome=True)
        self._changed(rank)
        return rank

    def _refusal(self, hello: dict[str, Any], rank: int) -> str | None:
        if not hmac.compare_digest(str(hello["secret"]).encode(), self._secret.encode()):
            return "its secret is of another boot"
        if hello["world_size"] != self._world_size or not 0 <= rank < self._world_size:
            return f"it is rank {rank} of {hello['world_size']}, and the server has {self._world_size} ranks"
        if rank in self.members:
            return f"rank {rank} is held by process {self.members[rank].pid}"
        return None

    def _hear(self, rank: int, frame: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        member = self.members[rank]
        if "ask" in frame:
            task = asyncio.create_task(self._answer(rank, frame, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        if "ready" in frame:
            member.ready = True
            self._served.add(rank)
        elif "blocked" in frame:
            member.blocked = frame["blocked"]
        self._changed(rank)

    async def _answer(self, rank: int, frame: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        error: WeightwireError | None = None
        try:
            await self._leave(rank, frame["why"])
        except Exception as raised:  # noqa: BLE001 - whatever it is, the rank is told and does not commit
            error = describe(raised)
        with suppress(ConnectionError):
            _send(writer, answer=frame["ask"], error=error and error.to_json())


def _send(writer: asyncio.StreamWriter, **frame: Any) -> None:
    if not writer.is_closing():
        writer.write(json.dumps(frame).encode() + b"\n")
