"""The front's calls to its ranks: the control routes, over each rank's own socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx

from weightwire.clients.http import SEQUENCE_HEADER, TIMEOUT_HEADER, UPDATE_HEADER
from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, PeerLost, TransferError, WeightwireError, error_from_json
from weightwire_server.private_directory import PrivateDirectory
from weightwire_server.roster import Roster

_GRACE_SECONDS = 2.0
"""How much longer than its deadline a rank is waited for, so that its own words arrive."""

_EXIT_STATUS_SECONDS = 1.0
_SLICE = 0.01


@dataclass(frozen=True, slots=True)
class RankCall:
    """What is asked of a rank.

    Attributes:
        path: The route.
        body: JSON for a POST; a GET has none.
        method: `"POST"` or `"GET"`.
        update_id: Id of the update, if it has one.
        sequence: Number of the message, if it has one.
    """

    path: str
    body: dict[str, Any] | None = None
    method: str = "POST"
    update_id: str | None = None
    sequence: int | None = None

    def headers(self, deadline: Deadline) -> dict[str, str]:
        """What travels beside the body."""
        headers = {TIMEOUT_HEADER: f"{deadline.remaining():.3f}"}
        if self.update_id is not None:
            headers[UPDATE_HEADER] = self.update_id
        if self.sequence is not None:
            headers[SEQUENCE_HEADER] = str(self.sequence)
        return headers


class RankCalls:
    """One client per rank; for one event loop.

    Args:
        directory: Where the ranks' sockets are.
        roster: Knows why a rank is not there.
        world_size: Ranks of the server.
    """

    def __init__(self, directory: PrivateDirectory, roster: Roster, world_size: int) -> None:
        self._roster = roster
        headers = {"Authorization": f"Bearer {directory.secret()}"}
        self._clients = [
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(directory.rank(rank)), verify=False),
                base_url=f"http://rank-{rank}",
                headers=headers,
                trust_env=False,
            )
            for rank in range(world_size)
        ]

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.aclose()

    async def call(self, rank: int, asked: RankCall, deadline: Deadline) -> dict[str, Any]:
        """Call one rank. Cancelled, it closes the connection, and the rank ends what it was doing.

        Raises:
            PeerLost: The rank is not there.
            DeadlineExceeded: It did not answer.
            WeightwireError: What it answered, in its own words.
        """
        who = f"rank {rank}"
        try:
            response = await self._clients[rank].request(
                asked.method,
                asked.path,
                json=asked.body,
                headers=asked.headers(deadline),
                timeout=httpx.Timeout(deadline.remaining() + (_GRACE_SECONDS if asked.method == "POST" else 0.0)),
            )
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"no answer to {asked.path} within {deadline.seconds:g} s", rank=who) from error
        except httpx.TransportError as error:
            raise PeerLost(f"{await self._explained(rank)} during {asked.path}", rank=who) from error
        body: dict[str, Any] = response.json()
        if response.is_success:
            return body
        raise _error(body["error"], who)

    async def _explained(self, rank: int) -> str:
        """Why a rank is not there; how a process ended is known a moment after its connections broke."""
        limit = Deadline(_EXIT_STATUS_SECONDS)
        while limit.remaining() and not self._roster.explained(rank):
            await asyncio.sleep(_SLICE)
        return self._roster.why(rank)


def _error(record: dict[str, Any], who: str) -> WeightwireError:
    error = error_from_json(record)
    if type(error).__name__ != record["type"]:  # not weightwire's: a bug there, and not a peer's failure
        error = TransferError.from_json(record)
    error.rank = error.rank or who
    return error
