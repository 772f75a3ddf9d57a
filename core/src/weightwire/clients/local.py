"""A Worker in this very process as a client: for tests, and for trainers that serve themselves."""

from __future__ import annotations

from typing import Any

from weightwire.clients.protocol import PauseMode
from weightwire.deadline import DEFAULT_SECONDS, Deadline
from weightwire.messages import WeightTransferUpdatePayload, pick_update
from weightwire.worker import Worker


class LocalClient:
    """Drives a `Worker` of this process.

    Args:
        worker: The worker.
        timeout: Deadline of a call that names none, in seconds.
    """

    def __init__(self, worker: Worker, *, timeout: float = DEFAULT_SECONDS) -> None:
        self.worker = worker
        self.timeout = timeout

    def _deadline(self, timeout: float | None, what: str) -> Deadline:
        return Deadline(self.timeout if timeout is None else timeout, what=what)

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
        """Connect the worker to a trainer."""
        self.worker.init(init_info, deadline=self._deadline(timeout, "init_weight_transfer_engine"))

    def start_weight_update(
        self, *, update_id: str | None = None, draft: bool = False, timeout: float | None = None
    ) -> None:
        """Open an update."""
        deadline = self._deadline(timeout, "start_weight_update")
        self.worker.start(update_id=update_id, draft=draft, deadline=deadline)

    def update_weights(
        self,
        update_info: WeightTransferUpdatePayload,
        *,
        update_id: str | None = None,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Receive one message."""
        mine = pick_update(update_info, index=0, count=1)
        deadline = self._deadline(timeout, "update_weights")
        self.worker.update(mine, update_id=update_id, sequence=sequence, deadline=deadline)

    def finish_weight_update(
        self, weight_version: str | None = None, *, update_id: str | None = None, timeout: float | None = None
    ) -> None:
        """Commit the open update."""
        deadline = self._deadline(timeout, "finish_weight_update")
        self.worker.finish(weight_version, update_id=update_id, deadline=deadline)

    def abort_weight_update(self, *, update_id: str | None = None, timeout: float | None = None) -> None:
        """Drop the open update."""
        self.worker.abort(update_id=update_id, deadline=self._deadline(timeout, "abort_weight_update"))

    def shutdown_weight_transfer_engine(self, *, timeout: float | None = None) -> None:
        """Leave the trainer."""
        self.worker.shutdown(deadline=self._deadline(timeout, "shutdown_weight_transfer_engine"))

    def get_world_size(self, include_dp: bool = True) -> int:
        """Worker ranks behind this client: one."""
        return 1

    def weight_info(self) -> dict[str, Any]:
        """What `Worker.info` says."""
        return self.worker.info()

    def pause(self, mode: PauseMode = "abort", *, timeout: float | None = None) -> None:
        """Keep readers out."""
        self.worker.pause(mode, deadline=self._deadline(timeout, "pause"))

    def resume(self, *, timeout: float | None = None) -> None:
        """Let readers in again."""
        self.worker.resume()
