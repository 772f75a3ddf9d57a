"""weightwire's Worker inside a worker process of vLLM.

vLLM calls the methods of its own ABC; a Worker does what they ask. Nothing raises here: vLLM reads only the first
failed answer of several ranks, so that the answers of the others would be taken for those of the next call. What went
wrong is kept instead, and the engine core (see engine_core.py) asks every rank for it after each call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightwire.deadline import DEFAULT_SECONDS, Deadline
from weightwire.errors import WeightwireError, describe
from weightwire.worker import Worker
from weightwire_vllm.options import parse_options
from weightwire_vllm.plugin import BACKEND
from weightwire_vllm.sink import VLLMSink, logger


class HostedEngine(WeightTransferEngine[Any, Any]):
    """Takes weights over any transport, for vLLM.

    Args:
        config: vLLM's `WeightTransferConfig`; `weightwire` takes the transport that the trainer names.
        vllm_config: The server's configuration; its `additional_config["weightwire"]` may give `staging`, `strict` and
            `cast`, see `VLLMSink`.
        device: Where the model lies.
        model: The live model.

    Raises:
        MessageError: Unknown or unfit options.
    """

    init_info_cls = dict
    update_info_cls = dict

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._options = parse_options(vllm_config)
        self._sinks: dict[int, VLLMSink] = {}
        self.worker = Worker(
            self._sink(model, self.model_config),
            backend=config.backend.removeprefix(BACKEND).lstrip("_") or None,
            parallel_config=self.parallel_config,
        )
        self._error: WeightwireError | None = None
        self._label: str | None = None
        self._clearing = False
        # vLLM passes no deadline on.
        self._seconds = DEFAULT_SECONDS

    def _sink(self, model: Any, model_config: Any) -> VLLMSink:
        if id(model) not in self._sinks:
            sink = VLLMSink(model, model_config, self.vllm_config, device=torch.device(self.device), **self._options)
            self._sinks[id(model)] = sink
        return self._sinks[id(model)]

    # What vLLM calls

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """As it is: the transport that it names parses it."""
        return init_dict

    def parse_update_info(self, update_dict: dict[str, Any]) -> dict[str, Any]:
        """As it is: the transport parses it."""
        return update_dict

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect to the trainer that sent `init_info`."""
        link = init_info.get("weightwire") if isinstance(init_info, dict) else None
        self._take_timeout(link)
        self._do(lambda: self.worker.init(init_info, deadline=self._deadline("init_weight_transfer_engine")))

    def start_weight_update(self) -> None:
        """Open an update of the model, or of the draft model that vLLM has set as the target."""
        draft = self.model is not self._default_model

        def start() -> None:
            if draft:
                self.worker.take_draft_model(self._sink(self.model, self.model_config))
            self.worker.start(draft=draft, deadline=self._deadline("the update"))

        self._do(start)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one message of the open update."""
        label = update_info.get("label") if isinstance(update_info, dict) else None
        self._label = label if isinstance(label, str) else None
        self._take_timeout(update_info)
        self._do(lambda: self.worker.update(update_info, deadline=self._deadline("update_weights")))

    def receive_weights(self, update_info: Any) -> None:
        """Receive one message of the open update."""
        self.update_weights(update_info)

    def finish_weight_update(self) -> None:
        """Commit if every rank of the fleet can."""
        if self._clearing:  # vLLM alone still believes in an update
            self._clearing = False
            return
        self._do(lambda: self.worker.finish(self._label, deadline=self._deadline("finish_weight_update")))

    def shutdown(self) -> None:
        """Leave the trainer."""
        self._do(self.worker.shutdown)

    def _take_timeout(self, message: object) -> None:
        """Give the calls from here on the time that their trainer gives them; the worker checks the message itself."""
        seconds = message.get("timeout") if isinstance(message, dict) else None
        self._seconds = float(seconds) if isinstance(seconds, int | float) else self._seconds

    def _deadline(self, what: str) -> Deadline:
        return Deadline(self._seconds, what=what)

    def _do(self, call: Callable[[], object]) -> None:
        self._error = None
        try:
            call()
        except Exception as error:  # noqa: BLE001  kept, and raised in the engine core
            self._error = describe(error)
            rank = self.worker.parallel_config.rank
            logger.error("weightwire: worker rank %s: %s: %s", rank, type(error).__name__, error)

    # What the engine core and, through vLLM's `collective_rpc`, clients ask

    def __call__(self, question: str) -> dict[str, Any]:
        """What this rank says of itself, as JSON, with the error of the last call.

        Args:
            question: `"outcome"` and `"info"` change nothing; `"abort"` ends the open update first; `"clear"` makes the
                next finish one that only ends vLLM's own belief in an update.
        """
        if question == "abort":
            self._do(self.worker.abort)
        elif question == "clear":
            self._clearing = True
        info = self.worker.info()
        return {**info, "pid": os.getpid(), "error": None if self._error is None else self._error.to_json()}
