"""An offline `LLM` of this process as a client."""

from __future__ import annotations

from typing import Any

from weightwire.clients.protocol import PauseMode
from weightwire.messages import WeightTransferUpdatePayload


class LocalLLMClient:
    """Drives an offline `vllm.LLM` that was made with a weightwire backend.

    `LLM.generate` returns when its answers are complete, so nobody reads while the caller sends weights from the same
    thread: pausing has nothing to do.

    Args:
        llm: The `vllm.LLM`.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
        """Connect the workers to a trainer."""
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(
        self, *, update_id: str | None = None, draft: bool = False, timeout: float | None = None
    ) -> None:
        """Open an update."""
        self.llm.start_draft_weight_update() if draft else self.llm.start_weight_update()

    def update_weights(
        self,
        update_info: WeightTransferUpdatePayload,
        *,
        update_id: str | None = None,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Receive one message."""
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(
        self, weight_version: str | None = None, *, update_id: str | None = None, timeout: float | None = None
    ) -> None:
        """Commit the open update."""
        self.llm.finish_weight_update(weight_version)

    def abort_weight_update(self, *, update_id: str | None = None, timeout: float | None = None) -> None:
        """Drop the open update."""
        self._ask("abort")

    def shutdown_weight_transfer_engine(self, *, timeout: float | None = None) -> None:
        """Leave the trainer."""
        self.llm.shutdown_weight_transfer_engine()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Worker ranks of the `LLM`."""
        parallel = self.llm.llm_engine.vllm_config.parallel_config
        return int(parallel.world_size_across_dp if include_dp else parallel.world_size)

    def weight_info(self) -> dict[str, Any]:
        """What the first worker says, and vLLM's label."""
        return {**self._ask("info")[0], "weight_version": self.llm.get_weight_version()}

    def pause(self, mode: PauseMode = "abort", *, timeout: float | None = None) -> None:
        """Nothing to do, see above."""

    def resume(self, *, timeout: float | None = None) -> None:
        """Nothing to do, see above."""

    def _ask(self, question: str) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.llm.collective_rpc("weight_transfer_engine", args=(question,))
        return answers
