"""What the ranks of the benchmark do: rounds of deltas and dense rounds, each of a model of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from weightwire.clients.fanout import FanoutClient
from weightwire.registry import WeightTransferTrainerFactory, engine_class
from weightwire.source import ModuleSource
from weightwire.testing.measure import Seat, Way, round_figures
from weightwire.testing.payload import build_module
from weightwire.testing.worker_host import WorkerHost
from weightwire.testing.workers import RankClient
from weightwire.worker import Worker

_MAX_PACING_RATE: Final = 47
"""Linux's SO_MAX_PACING_RATE; the socket module has no name for it."""


class RoundWay(Way):
    """Whole rounds of `send_weights` over one transport, of a model of its own of which some elements change.

    Args:
        name: Name of the way.
        backend: The transport.
        change: What changes before each round: `"random"`, `"rows"` or `"all"`.
        share: How much of it.
        wire: Bytes per second that each connection may carry; None is as fast as it goes.
        options: Fields of the transport's init info.
    """

    weighed_rounds = 2

    def __init__(
        self, name: str, backend: str, *, change: str, share: float, wire: int | None = None, **options: Any
    ) -> None:
        self.name = name
        self._backend = backend
        self._change = change
        self._share = share
        self._wire = wire
        self._options = options
        self._model: nn.Module | None = None
        self._random = np.random.default_rng(0)

    def _own(self, seat: Seat) -> nn.Module:
        if self._model is None:
            self._model = build_module(seat.payload, seed=0 if seat.sends else None)
        return self._model

    def held(self, seat: Seat) -> list[torch.Tensor]:
        """This way's own model."""
        found = dict(self._own(seat).named_parameters())
        return [found[name].data for name in seat.payload.names]

    def warm(self, seat: Seat) -> None:
        """Touch the model."""
        self._own(seat)

    def refresh(self, seat: Seat) -> None:
        """Change some elements."""
        for tensor in self.held(seat):
            change(tensor, self._change, self._share, self._random)

    def offer(self, seat: Seat) -> str:
        """Host a worker."""
        self._host = WorkerHost(Worker(self._own(seat)))
        return self._host.address

    def connect(self, seat: Seat, offers: list[str]) -> None:
        """Open the link."""
        if not seat.sends:
            return
        before = set(_connections())
        clients = [RankClient([address], [f"worker {place}"]) for place, address in enumerate(offers)]
        info = engine_class("trainer", self._backend).init_info_cls(**self._options)
        self._trainer = WeightTransferTrainerFactory.trainer_init(
            info, client=FanoutClient(clients), source=ModuleSource(self._own(seat))
        )
        if self._wire is not None:
            for descriptor in set(_connections()) - before:
                _pace(descriptor, self._wire)

    def step(self, seat: Seat) -> Mapping[str, Any] | None:
        """Send once."""
        if not seat.sends:
            return None
        report = self._trainer.send_weights()
        (worker,) = [rank for rank in report.ranks if "commit" in rank.seconds]
        details = report.ranks[0].details
        return {
            **round_figures(report),
            "wire_bytes": worker.bytes,
            "way": details.get("way", "dense"),
            "kernels": details.get("kernels", ""),
            "find_milliseconds": 1e3 * details.get("find_seconds", 0.0),
            "worker_receive_milliseconds": 1e3 * worker.seconds["receive"],
            "worker_prepare_milliseconds": 1e3 * worker.seconds["prepare"],
            "apply_milliseconds": 1e3 * (worker.seconds["prepare"] + worker.seconds["commit"]),
        }

    def close(self, seat: Seat) -> None:
        """Leave."""
        if seat.sends:
            self._trainer.shutdown()
        else:
            self._host.close()
        self._model = None


def change(tensor: torch.Tensor, what: str, share: float, random: np.random.Generator) -> None:
    """Give some elements of a 16-bit tensor other bits.

    Args:
        tensor: Contiguous.
        what: `"random"` elements, whole `"rows"`, or `"all"`.
        share: How many of them.
        random: Where randomness comes from.
    """
    data = tensor.view(-1).view(torch.int16).numpy()
    if what == "all":
        data ^= 1
    elif what == "rows":
        rows = data.reshape(-1, tensor.shape[-1])
        rows[random.random(len(rows)) < share] ^= 1
    else:
        # Gaps between changes that come at random are geometric; that is faster than a number for each element.
        gaps = random.geometric(share, int(data.size * share * 1.1) + 64)
        places = np.cumsum(gaps) - 1
        data[places[places < data.size]] ^= 1


def _connections() -> list[int]:
    """Descriptors of this process's TCP connections."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                    sock.getpeername()
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        found.append(int(entry.name))
        except OSError:  # it listens, or was closed meanwhile
            continue
    return found


def _pace(descriptor: int, rate: int) -> None:
    """Have the kernel send at most `rate` bytes per second over a connection."""
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, rate)
