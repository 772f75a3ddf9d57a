"""One call to several ranks at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, PeerFailed, PeerLost, TransferAborted, WeightwireError
from weightwire_server.rank_calls import RankCall, RankCalls

PATIENCE_SECONDS = 0.5
"""Time that the other ranks have to end by themselves once one has failed: their trainer tells them, mostly."""

_LET_GO_SECONDS = 2.0
_SLICE = 0.05
_HEARSAY = (PeerFailed, PeerLost, TransferAborted)
"""What a rank says that was told of another's failure."""


@dataclass(slots=True)
class Outcomes:
    """What the ranks answered.

    Attributes:
        answers: Rank to body, of those that succeeded.
        errors: Rank to error, in order of arrival.
        silent: Ranks among the errors that have not answered, so that nobody knows what they did.
    """

    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    errors: dict[int, WeightwireError] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)

    def raise_failed(self) -> None:
        """Raise the error of the lowest rank that has one of its own, if any failed: a repetition gets the same."""
        if self.errors:
            own = {rank: error for rank, error in self.errors.items() if not isinstance(error, _HEARSAY)}
            first = own or self.errors
            raise first[min(first)]


async def everywhere(
    calls: RankCalls,
    asked: Mapping[int, RankCall],
    deadline: Deadline,
    *,
    patience: float = PATIENCE_SECONDS,
    failed: Callable[[WeightwireError], None] | None = None,
    give_up: Callable[[dict[int, Any]], Awaitable[None]] | None = None,
) -> Outcomes:
    """Call ranks at once and gather what they answer; none is left running.

    Args:
        calls: The way to them.
        asked: Rank to what it is asked.
        deadline: Deadline of the call; cancelled, the ranks' calls end too.
        patience: Seconds that the others have left after the first failure.
        failed: Called with the first error as it comes.
        give_up: Called with the ranks that run on after that, to end them before they are left alone.

    Raises:
        BaseException: What `deadline` was cancelled with.
    """
    found = Outcomes()
    running = {asyncio.create_task(calls.call(rank, one, deadline)): rank for rank, one in asked.items()}
    limit: float | None = None
    try:
        while running:
            await _gather(running, found)
            if deadline.cancelled is not None:
                raise deadline.cancelled
            if limit is None and found.errors:
                limit = time.monotonic() + patience
                if failed is not None:
                    failed(next(iter(found.errors.values())))
            if running and limit is not None and time.monotonic() >= limit:
                await _end(running, found, give_up)
    finally:
        await _cancel(running)
    return found


async def _gather(running: dict[asyncio.Task[dict[str, Any]], int], found: Outcomes) -> None:
    done, _ = await asyncio.wait(running, timeout=_SLICE, return_when=asyncio.FIRST_COMPLETED)
    for task in sorted(done, key=lambda task: running[task]):
        rank = running.pop(task)
        try:
            found.answers[rank] = task.result()
        except WeightwireError as error:
            found.errors[rank] = error
            if isinstance(error.__cause__, httpx.TimeoutException):
                found.silent.add(rank)


async def _end(
    running: dict[asyncio.Task[dict[str, Any]], int],
    found: Outcomes,
    give_up: Callable[[dict[int, Any]], Awaitable[None]] | None,
) -> None:
    if give_up is not None:
        await give_up(dict.fromkeys(running.values()))
        until = time.monotonic() + _LET_GO_SECONDS
        while running and time.monotonic() < until:
            await _gather(running, found)
    for rank in running.values():
        found.silent.add(rank)
        found.errors[rank] = DeadlineExceeded("it was given up after another rank had failed", rank=f"rank {rank}")
    await _cancel(running)
    running.clear()


async def _cancel(running: Iterable[asyncio.Task[Any]]) -> None:
    """End calls that nobody waits for; their connections are closed afterwards."""
    tasks = list(running)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
