"""What the control routes drive: one rank in this process, or (`front.py`) several in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from weightwire.deadline import Deadline
from weightwire.errors import PeerLost, WeightwireError
from weightwire.gate import Gate, PauseMode
from weightwire.messages import WeightTransferUpdatePayload, pick_update
from weightwire_server.call_threads import CallThreads
from weightwire_server.checksums import keyed, place_of

if TYPE_CHECKING:
    from weightwire.worker import Worker

CALLS_AT_ONCE = 16

T = TypeVar("T")


@runtime_checkable
class Host(Protocol):
    """The calls of a worker, without blocking the event loop; errors are as `Worker`'s."""

    @property
    def gate(self) -> Gate:
        """What readers hold."""

    @property
    def is_paused(self) -> bool:
        """Whether readers are kept out."""

    def world_size(self, *, across_dp: bool) -> int:
        """Ranks, of all data-parallel replicas or of one."""

    async def init(self, init_info: dict[str, Any], deadline: Deadline) -> None:
        """Connect to a trainer."""

    async def start(self, update_id: str | None, deadline: Deadline, *, draft: bool) -> None:
        """Open an update."""

    async def update(
        self, payload: WeightTransferUpdatePayload, update_id: str | None, sequence: int | None, deadline: Deadline
    ) -> None:
        """Receive one message."""

    async def finish(self, label: str | None, update_id: str | None, deadline: Deadline) -> None:
        """Commit."""

    async def abort(self, update_id: str | None, deadline: Deadline) -> None:
        """Drop the open update."""

    async def shutdown(self, deadline: Deadline) -> None:
        """Leave the trainer."""

    async def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Keep readers out."""

    async def resume(self) -> None:
        """Let readers in again."""

    async def set_weight_version(self, label: str, deadline: Deadline) -> None:
        """Set the label alone."""

    async def checksums(self, deadline: Deadline) -> dict[str, str]:
        """SHA-256 in hex by `dp0:pp0:pcp0:tp0:<parameter>`."""

    async def inventory(self, deadline: Deadline) -> dict[str, dict[str, Any]]:
        """What an update may bring, by place (`dp0:pp0:pcp0:tp0`) and name; ranks that do not tell are left out."""

    async def reset(self, deadline: Deadline) -> None:
        """Fill every parameter with zeros."""

    async def info(self) -> dict[str, Any]:
        """State, label, revision and the rest; never waits for a transfer."""

    async def check(self, deadline: Deadline) -> None:
        """Return if somebody may read now, whether or not readers are paused; else raise why not."""

    async def opened(self) -> None:
        """The event loop that serves this host has started."""

    async def closed(self) -> None:
        """The server ends: leave the trainer."""


class OneRank:
    """A worker in this process; its blocking calls run in threads.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._engine_threads = CallThreads("engine", limit=CALLS_AT_ONCE)
        self._control_threads = CallThreads("control", limit=CALLS_AT_ONCE)

    @property
    def gate(self) -> Gate:
        """The worker's own."""
        return self._worker.gate

    @property
    def is_paused(self) -> bool:
        """Whether readers are kept out."""
        return self._worker.is_paused

    def world_size(self, *, across_dp: bool) -> int:
        """Ranks of the deployment that the worker is one of."""
        return self._worker.world_size if across_dp else int(self._worker.parallel_config.world_size)

    async def init(self, init_info: dict[str, Any], deadline: Deadline) -> None:
        """Connect to a trainer."""
        await self._engine(deadline, lambda: self._worker.init(init_info, deadline=deadline))

    async def start(self, update_id: str | None, deadline: Deadline, *, draft: bool) -> None:
        """Open an update."""
        await self._engine(deadline, lambda: self._worker.start(update_id=update_id, draft=draft, deadline=deadline))

    async def update(
        self, payload: WeightTransferUpdatePayload, update_id: str | None, sequence: int | None, deadline: Deadline
    ) -> None:
        """Receive one message; of a list, this rank's element."""
        parallel = self._worker.parallel_config
        index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        mine = pick_update(payload, index=index, count=self._worker.world_size)
        await self._engine(
            deadline,
            lambda: self._worker.update(mine, update_id=update_id, sequence=sequence, deadline=deadline),
        )

    async def finish(self, label: str | None, update_id: str | None, deadline: Deadline) -> None:
        """Commit."""
        await self._engine(deadline, lambda: self._worker.finish(label, update_id=update_id, deadline=deadline))

    async def abort(self, update_id: str | None, deadline: Deadline) -> None:
        """Drop the open update."""
        await self._aside(lambda: self._worker.abort(update_id=update_id, deadline=deadline))

    async def shutdown(self, deadline: Deadline) -> None:
        """Leave the trainer."""
        await self._engine(deadline, lambda: self._worker.shutdown(deadline=deadline))

    async def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Keep readers out."""
        await self._aside(lambda: self._worker.pause(mode, deadline=deadline))

    async def resume(self) -> None:
        """Let readers in again."""
        self._worker.resume()

    async def set_weight_version(self, label: str, deadline: Deadline) -> None:
        """Set the label alone."""
        await self._aside(lambda: self._worker.set_weight_version(label))

    async def checksums(self, deadline: Deadline) -> dict[str, str]:
        """Of this rank's parameters."""
        sums = await self._aside(lambda: self._worker.checksums(deadline=deadline))
        return keyed(sums, self._worker.parallel_config)

    async def inventory(self, deadline: Deadline) -> dict[str, dict[str, Any]]:
        """Of this rank's model."""
        held = await self._aside(lambda: self._worker.inventory(deadline=deadline))
        records = {one.names[0]: one.to_json() for one in held}
        return {place_of(self._worker.parallel_config): records} if records else {}

    async def reset(self, deadline: Deadline) -> None:
        """Fill every parameter with zeros."""
        await self._aside(lambda: self._worker.reset(deadline=deadline))

    async def info(self) -> dict[str, Any]:
        """What the worker says of itself."""
        return self._worker.info()

    async def check(self, deadline: Deadline) -> None:
        """Whether the weights may be read."""
        async with self.gate.reading(ignore_pause=True, deadline=deadline):
            return

    async def opened(self) -> None:
        """Nothing to do."""

    async def closed(self) -> None:
        """Drop what is open and leave the trainer."""
        await asyncio.to_thread(self._leave)

    def _leave(self) -> None:
        try:
            self._worker.abort()
            self._worker.shutdown()
        except WeightwireError:
            return  # a commit that does not end has to be left to itself

    async def _aside(self, call: Callable[[], T]) -> T:
        return await self._control_threads.submit(call)

    async def _engine(self, deadline: Deadline, call: Callable[[], T]) -> T:
        """Run one of the engine's calls; when the server is stopped meanwhile, its deadline is cancelled."""
        running = self._engine_threads.submit(call)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            deadline.cancel(PeerLost(f"the server was stopped during {deadline.what}"))
            return await running  # the call ends with these words, and they still reach the client


def as_host(served: Worker | Host) -> Host:
    """`served` as the control routes drive it."""
    return served if isinstance(served, Host) else OneRank(served)
