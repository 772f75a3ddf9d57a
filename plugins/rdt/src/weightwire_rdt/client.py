"""vLLM's own client for Ray actors: four calls, each to every actor, with vLLM's request objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weightwire.deadline import DEFAULT_SECONDS
from weightwire.errors import MessageError, Unsupported
from weightwire.messages import (
    WeightTransferInitRequest,
    WeightTransferUpdatePayload,
    WeightTransferUpdateRequest,
)
from weightwire_rdt.actor_calls import everywhere


class RayVLLMWeightSyncClient:
    """Drives Ray actors that have vLLM's methods: an actor of `AsyncLLM`, or one of your own.

    The actors get a `WeightTransferInitRequest` or a `WeightTransferUpdateRequest`: what vLLM's `AsyncLLM` reads is
    `request.init_info`, so a dict would not do. They hold JSON types only; the actor's process needs weightwire
    installed to have them. Whatever an actor raises is raised here as weightwire's error, in its words. There are no
    update ids, no abort and no pause: `RayWorkerGroup` has all of that, for workers of weightwire's.

    Args:
        handles: The actor, or the data-parallel replicas of one deployment, each of which knows its own index. For
            deployments that know nothing of each other use `FanoutClient`.
        timeout: How long each call may take, in seconds.

    Raises:
        MessageError: No handle.
    """

    def __init__(self, handles: Any, *, timeout: float = DEFAULT_SECONDS) -> None:
        several = isinstance(handles, Sequence)
        self.handles = list(handles) if several else [handles]
        self.timeout = timeout
        if not self.handles:
            raise MessageError("RayVLLMWeightSyncClient needs at least one actor handle")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every actor connect to a trainer."""
        self._all("init_weight_transfer_engine", WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self) -> None:
        """Open an update on every actor."""
        self._all("start_weight_update")

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        """Have every actor receive one message."""
        self._all("update_weights", WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have every actor commit, and tell it the label afterwards."""
        self._all("finish_weight_update")
        if weight_version is not None:
            self._all("update_weight_version", weight_version)

    def shutdown_weight_transfer_engine(self) -> None:
        """Have every actor leave the trainer."""
        self._all("shutdown_weight_transfer_engine")

    @property
    def get_world_size(self) -> Callable[..., int]:
        """`get_world_size(include_dp=True)`: worker ranks of the deployment, as the first actor says.

        Raises:
            AttributeError: It does not tell, and the trainer's `world_size` has to be given.
        """
        first = self.handles[0]
        if not hasattr(first, "get_world_size"):
            raise AttributeError(f"{first!r} has no method get_world_size")

        def ask(include_dp: bool = True) -> int:
            call = first.get_world_size.remote(include_dp)
            return int(everywhere({repr(first): call}, self.timeout, what="get_world_size")[0])

        return ask

    def _all(self, method: str, *arguments: Any) -> None:
        lacking = next((handle for handle in self.handles if not hasattr(handle, method)), None)
        if lacking is not None:
            raise Unsupported(f"{lacking!r} has no method {method}")
        calls = {repr(handle): getattr(handle, method).remote(*arguments) for handle in self.handles}
        everywhere(calls, self.timeout, what=method)
