"""Several ranks as one worker: one gate, one state, and every call on all of them or on none.

See docs/explanation/several-ranks.md for who may fail when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from weightwire.deadline import Deadline
from weightwire.errors import Busy, UpdateRefused, WeightwireError
from weightwire.gate import Gate, Hold, PauseMode
from weightwire.messages import WeightTransferUpdatePayload, pick_update
from weightwire_server.call_threads import CallThreads
from weightwire_server.fanout import Outcomes, everywhere
from weightwire_server.hosting import CALLS_AT_ONCE
from weightwire_server.lifeline import Asking
from weightwire_server.merging import merged_info
from weightwire_server.permission import Permission
from weightwire_server.private_directory import PrivateDirectory
from weightwire_server.rank_calls import RankCall, RankCalls
from weightwire_server.roster import Roster
from weightwire_server.standing import Standing

_INFO_SECONDS = 2.0
_ABORT_SECONDS = 5.0


class RankStarter(Protocol):
    """Starts the ranks' processes, and again those that end."""

    async def open(self, explain: Callable[[int, str], bool]) -> None:
        """Start them; `explain` is told how a process ended, and tells whether it has been of use."""

    async def close(self) -> None:
        """End them."""


class Front:
    """The front of a server's ranks: control routes drive it as they drive a worker.

    Args:
        directory: Where it meets its ranks, created already.
        world_size: How many ranks there are.
        starter: Starts them; None where somebody else does, torchrun say.
        complete: Called in the event loop once all ranks have become ready for the first time.
    """

    def __init__(
        self,
        directory: PrivateDirectory,
        world_size: int,
        *,
        starter: RankStarter | None = None,
        complete: Callable[[], None] | None = None,
    ) -> None:
        self.gate = Gate()
        self._directory = directory
        self._world_size = world_size
        self._starter = starter
        self._complete = complete
        self._threads = CallThreads("gate", limit=CALLS_AT_ONCE)
        self._roster = Roster(directory, world_size, changed=self._rank_changed, leave=self._leave)
        self._standing = Standing(self.gate, self._roster)
        self._ready: set[int] = set()
        self._linked = False
        self._draft = False
        self._permission: Permission | None = None
        self._resetting: Permission | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    def reading(self) -> Hold:
        """Hold every rank's weights still while an answer is made: `with` or `async with`.

        Raises:
            Busy: A rank is not there.
            Paused: The gate was paused with mode wait or abort.
            WeightsTorn: The ranks' weights are not whole, or do not belong together.
        """
        return self.gate.reading()

    # What a server asks

    async def opened(self) -> None:
        """Take ranks in."""
        await self._roster.open()
        self._calls = RankCalls(self._directory, self._roster, self._world_size)
        if self._starter is not None:
            await self._starter.open(self._roster.explain)

    async def closed(self) -> None:
        """End the ranks, which leave their trainer."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._starter is not None:
            await self._starter.close()
        await self._calls.close()
        await self._roster.close()

    @property
    def is_paused(self) -> bool:
        """Whether readers are kept out."""
        return self.gate.paused

    def world_size(self, *, across_dp: bool) -> int:
        """Ranks of this server."""
        return self._world_size

    async def info(self) -> dict[str, Any]:
        """The state of the worst rank, and each rank's own; a rank that does not answer in 2 s counts as lost."""
        deadline = Deadline(_INFO_SECONDS, what="weight_info")
        absent = self._roster.absent()
        asked = {rank: RankCall("/weight_info", method="GET") for rank in self._present()}
        found = await everywhere(self._calls, asked, deadline, patience=_INFO_SECONDS)
        absent |= {rank: str(error) for rank, error in found.errors.items()}
        gate = f"paused({self.gate.mode})" if self.gate.paused else "open"
        pids = {rank: member.pid for rank, member in self._roster.members.items()}
        return merged_info(
            found.answers, absent, pids=pids, torn=self._standing.torn, gate=gate, world_size=self._world_size
        )

    async def check(self, deadline: Deadline) -> None:
        """Whether the weights may be read, and every rank answers."""
        async with self.gate.reading(ignore_pause=True, deadline=deadline):
            pass
        known = await self.info()
        if known["state"] == "lost":
            raise Busy(known["reason"])

    # The trainer's calls

    async def init(self, init_info: dict[str, Any], deadline: Deadline) -> None:
        """Connect every rank to the trainer."""
        await self._on_all(RankCall("/init_weight_transfer_engine", {"init_info": init_info}), deadline)
        self._linked = isinstance(init_info.get("weightwire"), dict)

    async def start(self, update_id: str | None, deadline: Deadline, *, draft: bool) -> None:
        """Open an update on every rank, or on none."""
        route = "/start_draft_weight_update" if draft else "/start_weight_update"
        found = await self._everywhere(RankCall(route, update_id=update_id), deadline)
        if found.errors and found.answers:
            await self._abort_on(found.answers, update_id)
        found.raise_failed()
        self._draft = draft

    async def update(
        self, payload: WeightTransferUpdatePayload, update_id: str | None, sequence: int | None, deadline: Deadline
    ) -> None:
        """Have every rank receive its element of a list, or the one message; where one fails, all drop the update."""
        self._require_all()
        torn = self._standing.torn
        asked = {}
        for rank in range(self._world_size):
            mine = pick_update(payload, index=rank, count=self._world_size)
            if torn is not None and mine.get("scope") == "partial":
                raise UpdateRefused(f"only a full update makes the weights whole again: {torn}")
            body = {"update_info": mine}
            asked[rank] = RankCall("/update_weights", body, update_id=update_id, sequence=sequence)
        abort = partial(self._abort_on, update_id=update_id)
        found = await everywhere(self._calls, asked, deadline, give_up=abort)
        if found.errors and found.answers:
            await abort(found.answers)
        found.raise_failed()

    async def finish(self, label: str | None, update_id: str | None, deadline: Deadline) -> None:
        """Commit on every rank, or on none; a rank that dies between the others' commits leaves the server torn."""
        body = None if label is None else {"weight_version": label}
        asked = RankCall("/finish_weight_update", body, update_id=update_id)
        if self._permission is not None:  # a repetition waits in the ranks, anything else is refused there
            (await self._everywhere(asked, deadline)).raise_failed()
            return
        self._require_all()
        self._permission = permission = self._new_permission(deadline, vote=not self._linked)
        draft = self._draft
        try:
            found = await self._everywhere(asked, deadline, patience=_ABORT_SECONDS, failed=permission.refuse)
            self._standing.finished(found, granted=permission.granted, draft=draft)
        finally:
            self._permission = None
            await permission.end()
        found.raise_failed()

    async def abort(self, update_id: str | None, deadline: Deadline) -> None:
        """Drop the open update, on the ranks that are there."""
        asked = dict.fromkeys(self._present(), RankCall("/abort_weight_update", update_id=update_id))
        (await everywhere(self._calls, asked, deadline)).raise_failed()

    async def shutdown(self, deadline: Deadline) -> None:
        """Leave the trainer, on the ranks that are there."""
        asked = dict.fromkeys(self._present(), RankCall("/shutdown_weight_transfer_engine"))
        (await everywhere(self._calls, asked, deadline)).raise_failed()

    # The operator's calls

    async def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Keep readers out."""
        await self._threads.submit(lambda: self.gate.pause(mode, deadline=deadline))

    async def resume(self) -> None:
        """Let readers in again."""
        self._standing.refuse_torn("resume")
        self.gate.resume()

    async def set_weight_version(self, label: str, deadline: Deadline) -> None:
        """Set the label on every rank."""
        self._standing.refuse_torn("update_weight_version")
        await self._on_all(RankCall("/update_weight_version", {"new_version": label}), deadline)

    async def checksums(self, deadline: Deadline) -> dict[str, str]:
        """Of every rank's parameters, keyed by rank."""
        self._require_all()
        self._standing.refuse_torn("weight_checker checksum")
        async with self.gate.reading(deadline=deadline, ignore_pause=True):
            answers = await self._on_all(RankCall("/weight_checker", {"action": "checksum"}), deadline)
        return {key: value for rank in sorted(answers) for key, value in answers[rank]["checksums"].items()}

    async def inventory(self, deadline: Deadline) -> dict[str, dict[str, Any]]:
        """Of every rank's model."""
        answers = await self._on_all(RankCall("/weight_info?parameters=true", method="GET"), deadline)
        return {place: held for answer in answers.values() for place, held in answer.get("parameters", {}).items()}

    async def reset(self, deadline: Deadline) -> None:
        """Fill every rank's parameters with zeros."""
        self._require_all()
        if self._resetting is not None:
            raise Busy("the weights are being reset already")
        self._resetting = self._new_permission(deadline, vote=False)
        try:
            found = await self._everywhere(RankCall("/weight_checker", {"action": "reset"}), deadline)
            if found.answers:
                self._standing.reset()
        finally:
            permission, self._resetting = self._resetting, None
            await permission.end()
        found.raise_failed()

    # Calls to ranks

    def _present(self) -> list[int]:
        return [rank for rank in range(self._world_size) if self._roster.ready(rank)]

    def _require_all(self) -> None:
        if absent := self._roster.absent():
            raise Busy("; ".join(absent.values()))

    async def _everywhere(self, asked: RankCall, deadline: Deadline, **how: Any) -> Outcomes:
        self._require_all()
        return await everywhere(self._calls, dict.fromkeys(range(self._world_size), asked), deadline, **how)

    async def _on_all(self, asked: RankCall, deadline: Deadline) -> dict[int, dict[str, Any]]:
        found = await self._everywhere(asked, deadline)
        found.raise_failed()
        return found.answers

    async def _abort_on(self, ranks: Mapping[int, Any], update_id: str | None) -> None:
        """Drop an update where it stands alone; a rank that does not let go has a broken link and says so later."""
        asked = {rank: RankCall("/abort_weight_update", update_id=update_id) for rank in ranks}
        await everywhere(self._calls, asked, Deadline(_ABORT_SECONDS, what="abort_weight_update"))

    # What ranks say

    async def _leave(self, rank: int, why: Asking) -> None:
        """A rank asks before it writes what readers read."""
        if why == "receiving":  # in place: it has said so, and no new reader gets in
            deadline = Deadline(what="the readers to finish")
            await self._threads.submit(lambda: self.gate.close(deadline))
            self.gate.open()
            return
        permission = self._permission if why == "committing" else self._resetting
        if permission is None:
            raise Busy("the front of this rank has not asked for this")
        await permission.ask(rank)

    def _new_permission(self, deadline: Deadline, *, vote: bool) -> Permission:
        return Permission(self.gate, self._threads, ranks=self._world_size, deadline=deadline, vote=vote)

    def _rank_changed(self, rank: int) -> None:
        if self._roster.ready(rank) and rank not in self._ready:
            self._ready.add(rank)
            self._standing.joined(rank)
            if len(self._ready) == self._world_size and self._complete is not None:
                self._complete()
                self._complete = None
        elif not self._roster.ready(rank) and rank in self._ready:
            self._ready.discard(rank)
            if not self._closing:
                self._keep(self._abort_rest())
        self._standing.refresh()

    async def _abort_rest(self) -> None:
        """A rank is gone, and with it whatever update was on."""
        with suppress(WeightwireError):  # a commit goes on, and ends by itself
            await self.abort(None, Deadline(_ABORT_SECONDS, what="abort_weight_update"))

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
