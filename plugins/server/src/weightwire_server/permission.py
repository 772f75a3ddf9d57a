"""Leave to write what readers read, to commit mostly: all ranks of a server get it, or none."""

from __future__ import annotations

import asyncio

from weightwire.deadline import Deadline
from weightwire.errors import TransferAborted, WeightwireError
from weightwire.gate import Gate
from weightwire_server.call_threads import CallThreads

_READERS_SHARE = 0.8
"""Of the time that is left, for the readers; ranks wait for the answer for nine tenths of it."""


class Permission:
    """One finish, or one reset: the first rank that is ready for it closes the front's gate.

    Args:
        gate: The front's.
        threads: Where closing it waits.
        ranks: How many there are.
        deadline: Deadline of the call.
        vote: Whether ranks must wait for each other here; those that vote with a trainer wait there.
    """

    def __init__(self, gate: Gate, threads: CallThreads, *, ranks: int, deadline: Deadline, vote: bool) -> None:
        self._gate = gate
        self._threads = threads
        self._ranks = ranks
        self._deadline = deadline.part(_READERS_SHARE, "the readers to finish")
        self._vote = vote
        self._prepared: set[int] = set()
        self._closing: asyncio.Task[None] | None = None
        self._decision: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def granted(self) -> bool:
        """Whether ranks may have committed."""
        return self._decision.done() and self._decision.exception() is None

    async def ask(self, rank: int) -> None:
        """A rank has prepared; returns once it may commit.

        Raises:
            WeightwireError: Why it may not.
        """
        self._prepared.add(rank)
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)
        if not self._decision.done() and not (self._vote and len(self._prepared) < self._ranks):
            self._decision.set_result(None)
        await asyncio.shield(self._decision)

    async def _close(self) -> None:
        try:
            await self._threads.submit(lambda: self._gate.close(self._deadline))
        except WeightwireError as error:
            self.refuse(error)
            raise

    def refuse(self, error: WeightwireError) -> None:
        """A rank cannot commit: nobody may who has not been given leave."""
        if not self._decision.done():
            self._decision.set_exception(error)
            self._decision.exception()  # whether or not a rank asks, it has been looked at

    async def end(self) -> None:
        """Every rank has answered or is given up: let readers in again."""
        self.refuse(TransferAborted("the commit was given up"))
        if self._closing is None:
            return
        self._deadline.cancel(TransferAborted("the commit was given up"))
        try:
            await self._closing
        except WeightwireError:
            return  # it did not close
        self._gate.open()
