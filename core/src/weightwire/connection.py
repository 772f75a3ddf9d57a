"""A worker's connection to a trainer: the transport's engine, whose link it is, and whether it stands."""

from __future__ import annotations

from typing import Any

import torch

from weightwire.deadline import Deadline
from weightwire.engine import WeightTransferEngine
from weightwire.errors import HandshakeError, OrderError
from weightwire.messages import LinkInfo, WeightTransferConfig
from weightwire.registry import WeightTransferEngineFactory


class _HostConfig:
    """Stands in for the host's configuration where there is none."""

    def __init__(self, parallel_config: Any) -> None:
        self.parallel_config = parallel_config
        self.model_config = None


class Connection:
    """At most one trainer at a time, over at most one transport at a time.

    Args:
        model: What weights go to.
        backend: The only transport to take; None takes the one the trainer names.
        parallel_config: Where this rank stands among the ranks of its server.
    """

    def __init__(self, model: Any, *, backend: str | None, parallel_config: Any) -> None:
        self._model = model
        self._wanted = backend
        self._parallel_config = parallel_config
        self._up = False
        self._info: LinkInfo | None = None
        self.engine: WeightTransferEngine[Any, Any] | None = None

    @property
    def linked(self) -> bool:
        """Whether a trainer is connected. A stock one has no link that could tell: it is until something fails."""
        if not self._up or self.engine is None:
            return False
        if self._info is None:
            return True
        link = self.engine.link
        return link is not None and link.alive

    @property
    def end(self) -> str:
        """Why it does not stand, in words."""
        link = self.engine.link if self.engine is not None else None
        failure = link.rendezvous.failure if link is not None else None
        return "its trainer is gone" if failure is None else f"its link was lost: {failure}"

    @property
    def backend(self) -> str | None:
        """The transport in use, or the only one that may be."""
        return self.engine.backend if self.engine is not None else self._wanted

    def foreign(self, info: LinkInfo | None) -> bool:
        """Whether `info` comes from another trainer than the one connected.

        Raises:
            OrderError: That one is alive, and `info` asks for no takeover.
        """
        held = self._info
        if held is None or info is None or held.trainer == info.trainer:
            return False
        if self.linked and not info.takeover:
            raise OrderError(f"trainer {held.trainer[:8]} is connected and alive: stop it first, or pass takeover=True")
        return True

    def open(
        self, init_info: dict[str, Any], info: LinkInfo | None, deadline: Deadline
    ) -> WeightTransferEngine[Any, Any]:
        """Connect to the trainer that sent `init_info`, of which `info` is weightwire's part; an older link is closed.

        Raises:
            MessageError: Unknown, missing or mistyped keys.
            HandshakeError: The two sides expect different things.
            PeerLost, DeadlineExceeded: The fleet did not come together.
        """
        engine = self._engine_for(info)
        typed = engine.parse_init_info(init_info)
        self._up = False
        engine.under(deadline)
        try:
            engine.init_transfer_engine(typed)
        finally:
            engine.under(None)
        self._info, self._up = info, True
        return engine

    def _engine_for(self, info: LinkInfo | None) -> WeightTransferEngine[Any, Any]:
        backend = self._wanted or (info.backend if info is not None else "nccl")
        if info is not None and self._wanted not in (None, info.backend):
            raise HandshakeError(
                f"this worker takes weights over {self._wanted!r} and the trainer sends over {info.backend!r}"
            )
        if self.engine is not None:
            if self.engine.config.backend == backend:
                return self.engine
            self.engine.shutdown()
        config = WeightTransferConfig(backend=backend)
        host = _HostConfig(self._parallel_config)
        self.engine = WeightTransferEngineFactory.create_engine(config, host, _device_of(self._model), self._model)
        self.engine.driven = True
        return self.engine

    def lost(self) -> None:
        """Note that the link does not stand any more."""
        self._up = False

    def close(self) -> None:
        """Leave the trainer; idempotent."""
        self._up, self._info = False, None
        if self.engine is not None:
            self.engine.shutdown()


def parse_link(init_info: dict[str, Any]) -> LinkInfo | None:
    """Weightwire's part of an init message; None for a stock trainer's.

    Raises:
        MessageError: Unknown, missing or mistyped keys.
    """
    record = init_info.get("weightwire") if isinstance(init_info, dict) else None
    return LinkInfo.parse(record, what="weightwire") if isinstance(record, dict) else None


def _device_of(model: Any) -> torch.device:
    if isinstance(device := getattr(model, "device", None), torch.device):
        return device
    parameters = getattr(model, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    return first.device if first is not None else torch.device("cpu")
