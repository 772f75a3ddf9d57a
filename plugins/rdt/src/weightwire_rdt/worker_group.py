"""Worker actors that are one server, and the client that drives them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from weightwire.clients.protocol import PauseMode
from weightwire.deadline import DEFAULT_SECONDS
from weightwire.errors import MessageError, WeightwireError
from weightwire.messages import WeightTransferUpdatePayload, pick_update
from weightwire_rdt.actor_calls import everywhere
from weightwire_rdt.cluster import join_cluster
from weightwire_rdt.worker_actor import CONCURRENCY, UNBOUNDED, WorkerActor

_GRACE_SECONDS = 5.0
"""How much longer than the worker the client waits, so that the worker's words arrive first."""
_ASK_SECONDS = 10.0
_CONTROL = frozenset({"abort", "info", "pause", "resume"})
_STATES = ("ready", "uninitialised", "torn", "updating")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class RayWorkerGroup:
    """A `ControlClient` of one server whose ranks are worker actors.

    Every call goes to all actors at once; the first error, in order of time, is raised with its class, and an actor
    that is gone is `PeerLost`. Hand the actors, not the group, to other actors: `RayWorkerGroup(actors)` is cheap.

    Each actor has its own readers' gate. All ranks commit or none does, but a reader that spans actors is kept out as
    a whole only by whoever starts it: pause the group around the update, and let no reader start meanwhile.

    Args:
        actors: Handles of the actors, by worker rank.
        timeout: Deadline of a call that names none, in seconds.

    Raises:
        MessageError: No actor.
    """

    def __init__(self, actors: Sequence[Any], *, timeout: float = DEFAULT_SECONDS) -> None:
        if not actors:
            raise MessageError("RayWorkerGroup needs at least one actor")
        self.actors = list(actors)
        self.timeout = timeout
        self._offset = 0
        self._update_id: str | None = None
        self._sequence = 0

    @classmethod
    def start(
        cls,
        build: str,
        count: int,
        arguments: dict[str, Any] | None = None,
        *,
        actor: type = WorkerActor,
        place: Callable[[int], Mapping[str, Any]] = lambda rank: _NOTHING,
        device: str | None = None,
        worker_options: dict[str, Any] | None = None,
        timeout: float = DEFAULT_SECONDS,
    ) -> Self:
        """Start `count` actors, the ranks of one tensor-parallel server, and wait until each has its model.

        Args:
            build: See `WorkerActor`.
            count: How many.
            arguments: See `WorkerActor`.
            actor: `WorkerActor`, or a class derived from it.
            place: Ray's options of each rank's actor, such as `Room.options`.
            device: See `WorkerActor`.
            worker_options: Keywords of `Worker`.
            timeout: How long that may take; then the group's own.

        Raises:
            PeerFailed: A model could not be made; in its words.
            DeadlineExceeded: The cluster did not start them in time.
        """
        made, actors = join_cluster().remote(**CONCURRENCY)(actor), []
        for rank in range(count):
            parallel = {"rank": rank, "world_size": count, "tensor_parallel_size": count}
            given = {"parallel": parallel, "device": device, "options": worker_options}
            actors.append(made.options(**place(rank)).remote(build, arguments, **given))
        group = cls(actors, timeout=timeout)
        try:
            group._each("info", [()] * count, timeout=timeout)
        except WeightwireError:
            group._kill()
            raise
        return group

    def stop(self) -> None:
        """Have the workers leave their trainer, and end the actors."""
        with contextlib.suppress(WeightwireError):
            self.shutdown_weight_transfer_engine(timeout=_ASK_SECONDS)
        self._kill()

    def _kill(self) -> None:
        ray = join_cluster()
        for actor in self.actors:
            ray.kill(actor)

    # ControlClient

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
        """Have every worker connect to a trainer."""
        # Of several servers each is told how many workers come before its own: errors name them by all of them.
        self._offset = int(init_info.get("weightwire", {}).get("worker_offset", 0))
        self._all("init", init_info, timeout=timeout)

    def start_weight_update(
        self, *, update_id: str | None = None, draft: bool = False, timeout: float | None = None
    ) -> None:
        """Open an update on every worker or on none, under an id of its own unless one is given."""
        self._update_id, self._sequence = update_id or uuid.uuid4().hex, 0
        try:
            self._all("start", timeout=timeout, update_id=self._update_id, draft=draft)
        except WeightwireError:
            with contextlib.suppress(WeightwireError):  # the first error is the one that matters
                self.abort_weight_update(update_id=self._update_id, timeout=_ASK_SECONDS)
            raise

    def update_weights(
        self,
        update_info: WeightTransferUpdatePayload,
        *,
        update_id: str | None = None,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Have every worker receive one message, or each its element of a list."""
        count = len(self.actors)
        infos = [(pick_update(update_info, index=index, count=count),) for index in range(count)]
        number = self._sequence if sequence is None else sequence
        self._sequence = number + 1
        self._each("update", infos, timeout=timeout, update_id=update_id or self._update_id, sequence=number)

    def finish_weight_update(
        self, weight_version: str | None = None, *, update_id: str | None = None, timeout: float | None = None
    ) -> None:
        """Have every worker commit."""
        self._all("finish", weight_version, timeout=timeout, update_id=update_id or self._update_id)

    def abort_weight_update(self, *, update_id: str | None = None, timeout: float | None = None) -> None:
        """Have every worker drop the open update."""
        self._all("abort", timeout=timeout, update_id=update_id or self._update_id)

    def shutdown_weight_transfer_engine(self, *, timeout: float | None = None) -> None:
        """Have every worker leave the trainer."""
        self._all("shutdown", timeout=timeout)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Worker ranks of the server, all of which answer."""
        return len(self._all("info", timeout=_ASK_SECONDS))

    def weight_info(self) -> dict[str, Any]:
        """`Worker.info` of the rank in the worst state, and those of all under `ranks`."""
        infos = self._all("info", timeout=_ASK_SECONDS)
        worst: dict[str, Any] = max(infos, key=lambda info: _STATES.index(info["state"]))
        return {**worst, "ranks": infos}

    def pause(self, mode: PauseMode = "abort", *, timeout: float | None = None) -> None:
        """Keep readers out of every worker."""
        self._all("pause", mode, timeout=timeout)

    def resume(self, *, timeout: float | None = None) -> None:
        """Let readers into every worker again."""
        self._all("resume", timeout=timeout)

    # What a server offers besides

    def update_weight_version(self, new_version: str, *, timeout: float | None = None) -> None:
        """Set the label alone."""
        self._all("set_weight_version", new_version, timeout=timeout)

    def checksums(self, *, timeout: float | None = None) -> list[dict[str, str]]:
        """`Worker.checksums` of every rank."""
        found: list[dict[str, str]] = self._all("checksums", timeout=timeout)
        return found

    def reset(self, *, timeout: float | None = None) -> None:
        """Have every worker zero its weights."""
        self._all("reset", timeout=timeout)

    # Calls to actors

    def _all(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        return self._each(method, [arguments] * len(self.actors), **options)

    def _each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, timeout: float | None = None, **keywords: Any
    ) -> list[Any]:
        seconds = self.timeout if timeout is None else timeout
        group = {"concurrency_group": "control"} if method in _CONTROL else {}
        calls = {
            f"worker rank {rank}": actor.call.options(**group).remote(method, list(given), keywords, seconds)
            for rank, (actor, given) in enumerate(zip(self.actors, arguments, strict=True), self._offset)
        }
        answers = everywhere(calls, seconds + (0 if method in UNBOUNDED else _GRACE_SECONDS), what=method)
        return [answer["value"] for answer in answers]
