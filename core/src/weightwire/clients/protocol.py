"""The control plane as a trainer engine sees it.

`VLLMWeightSyncClient` is the reference's four-method protocol: anything that has these methods can be driven.
`ControlClient` is what weightwire's own clients offer on top: deadlines, an id per update so that every call may be
repeated, abort, pause. `ControlPlane` lets a trainer engine use either.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol, runtime_checkable

from weightwire.deadline import Deadline
from weightwire.errors import Unsupported, WeightwireError
from weightwire.messages import WeightTransferUpdatePayload

PauseMode = Literal["keep", "wait", "abort"]


@runtime_checkable
class VLLMWeightSyncClient(Protocol):
    """The four calls of a weight update. All block, raise on failure, and reach every worker behind the client."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect every worker to the trainer that sends `init_info`."""

    def start_weight_update(self) -> None:
        """Open an update."""

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        """Receive one message of the open update."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit the open update; `weight_version` becomes the label."""


@runtime_checkable
class ControlClient(Protocol):
    """A client that takes deadlines and update ids, and has the calls around an update.

    `timeout` is in seconds; None means the client's own.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
        """Connect every worker to the trainer that sends `init_info`."""

    def start_weight_update(
        self, *, update_id: str | None = None, draft: bool = False, timeout: float | None = None
    ) -> None:
        """Open an update."""

    def update_weights(
        self,
        update_info: WeightTransferUpdatePayload,
        *,
        update_id: str | None = None,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Receive one message of the open update."""

    def finish_weight_update(
        self,
        weight_version: str | None = None,
        *,
        update_id: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Commit the open update; `weight_version` becomes the label."""

    def abort_weight_update(self, *, update_id: str | None = None, timeout: float | None = None) -> None:
        """Drop the open update."""

    def shutdown_weight_transfer_engine(self, *, timeout: float | None = None) -> None:
        """Leave the trainer."""

    def get_world_size(self, include_dp: bool = True) -> int:
        """Worker ranks behind the client."""

    def weight_info(self) -> dict[str, Any]:
        """Label, revision and state of the weights."""

    def pause(self, mode: PauseMode = "abort", *, timeout: float | None = None) -> None:
        """Keep readers out."""

    def resume(self, *, timeout: float | None = None) -> None:
        """Let readers in again."""


class ControlPlane:
    """Drives either kind of client; mints the id of each update.

    Args:
        client: A `ControlClient`, or anything with the four methods.
    """

    def __init__(self, client: VLLMWeightSyncClient) -> None:
        self.client = client
        self._full: ControlClient | None = client if isinstance(client, ControlClient) else None
        self._update_id: str | None = None
        self._sequence = 0

    def world_size(self) -> int | None:
        """Worker ranks behind the client; None where the client cannot tell."""
        ask = getattr(self.client, "get_world_size", None)
        return int(ask()) if callable(ask) else None

    def let_servers_go(self, lost: Callable[[int, WeightwireError], bool]) -> tuple[list[range], int] | None:
        """See `FanoutClient.let_servers_go`; None for a client that has one server, or needs all."""
        let_go = getattr(self.client, "let_servers_go", None)
        return let_go(lost) if callable(let_go) else None

    def leave_out(self, workers: Collection[int], error: WeightwireError) -> None:
        """See `FanoutClient.leave_out`; only after `let_servers_go` has returned something."""
        self.client.leave_out(workers, error)  # type: ignore[attr-defined]

    def initialise(self, init_info: dict[str, Any], deadline: Deadline) -> None:
        """Have every worker connect."""
        if self._full is not None:
            self._full.init_weight_transfer_engine(init_info, timeout=deadline.remaining())
        else:
            self.client.init_weight_transfer_engine(init_info)

    def start(self, deadline: Deadline, *, draft: bool = False) -> None:
        """Open an update under a new id."""
        self._update_id, self._sequence = uuid.uuid4().hex, 0
        if self._full is not None:
            self._full.start_weight_update(update_id=self._update_id, draft=draft, timeout=deadline.remaining())
        elif draft:
            raise Unsupported(f"{type(self.client).__name__} has no start_draft_weight_update")
        else:
            self.client.start_weight_update()

    def update(self, update_info: WeightTransferUpdatePayload, deadline: Deadline) -> None:
        """Send one message of the open update."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        if self._full is not None:
            self._full.update_weights(
                update_info, update_id=self._update_id, sequence=sequence, timeout=deadline.remaining()
            )
        else:
            self.client.update_weights(update_info)

    def update_callers(self, update_info: WeightTransferUpdatePayload, deadline: Deadline) -> None:
        """Send one message of an update that the caller opened through the client, under no id of ours."""
        if self._full is not None:
            self._full.update_weights(update_info, timeout=deadline.remaining())
        else:
            self.client.update_weights(update_info)

    def finish(self, weight_version: str | None, deadline: Deadline) -> None:
        """Have every worker commit the open update."""
        if self._full is not None:
            self._full.finish_weight_update(weight_version, update_id=self._update_id, timeout=deadline.remaining())
        elif weight_version is None:
            self.client.finish_weight_update()
        else:
            self.client.finish_weight_update(weight_version)

    def abort(self, timeout: float) -> None:
        """Have every worker drop the open update, where the client can say so."""
        if self._full is not None and self._update_id is not None:
            self._full.abort_weight_update(update_id=self._update_id, timeout=timeout)

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Pause every worker's readers.

        Raises:
            Unsupported: The client has no pause.
        """
        if self._full is None:
            raise Unsupported(f"{type(self.client).__name__} has no pause: pause the workers yourself")
        self._full.pause(mode, timeout=deadline.remaining())

    def resume(self, timeout: float) -> None:
        """Resume every worker's readers."""
        if self._full is not None:
            self._full.resume(timeout=timeout)
