"""What a checkpoint on disk costs: a round from mapped files in the page cache, against the same round from memory.

The bytes go over the transport named `nccl`, which has to be installed; the command itself knows no transport.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weightwire.clients.fanout import FanoutClient
from weightwire.layout import ParamMeta, dtype_from_name
from weightwire.registry import WeightTransferTrainerFactory, engine_class
from weightwire.source import ModuleSource, WeightSource
from weightwire.testing.measure import Case, Options, Seat, Way, model_like
from weightwire.testing.worker_host import WorkerHost
from weightwire.testing.workers import RankClient
from weightwire.worker import Worker
from weightwire_cli.checkpoint import SafetensorsSource
from weightwire_cli.safetensors_header import read_header

_TRANSPORT = "nccl"


class MemoryWay(Way):
    """`send_weights` of a module."""

    name = "memory"

    def offer(self, seat: Seat) -> str:
        """Host a worker."""
        self._host = WorkerHost(Worker(seat.model))
        return self._host.address

    def source(self, seat: Seat) -> WeightSource:
        """What is sent."""
        return ModuleSource(seat.model)

    def connect(self, seat: Seat, offers: list[str]) -> None:
        """Open the link."""
        if seat.sends:
            clients = [RankClient([address], [f"worker {place}"]) for place, address in enumerate(offers)]
            self._trainer = WeightTransferTrainerFactory.trainer_init(
                engine_class("trainer", _TRANSPORT).init_info_cls(),
                client=FanoutClient(clients),
                source=self.source(seat),
            )

    def step(self, seat: Seat) -> dict[str, Any] | None:
        """Send once."""
        if not seat.sends:
            return None
        report = self._trainer.send_weights()
        return {"transfer_seconds": report.seconds["transfer"]}

    def close(self, seat: Seat) -> None:
        """Leave."""
        if seat.sends:
            self._trainer.shutdown()
        else:
            self._host.close()


class DiskWay(MemoryWay):
    """`send_weights` of a checkpoint, opened anew in every round as a push does."""

    name = "disk"

    def source(self, seat: Seat) -> WeightSource:
        """A checkpoint of the same payload."""
        self._path = Path(seat.directory, "model.safetensors")
        save_file(dict(zip(seat.payload.names, seat.tensors(), strict=True)), self._path)
        self._written = _writable(self._path)
        return _Reopened(self._path)

    def held(self, seat: Seat) -> list[torch.Tensor]:
        """On the sender the file itself: what is written there is in the page cache at once."""
        if not seat.sends:
            return super().held(seat)
        return [self._written[name] for name in seat.payload.names]


class _Reopened(WeightSource):
    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return SafetensorsSource(self._path).metadata

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return SafetensorsSource(self._path).iter_full()


def _writable(path: Path) -> dict[str, torch.Tensor]:
    """The file's tensors, shared with whoever reads it."""
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
        tensors = read_header(file.fileno(), path=str(path))
    return {
        one.name: torch.frombuffer(mapped, dtype=torch.uint8, offset=one.start, count=one.stop - one.start)
        .view(dtype_from_name(one.dtype))
        .view(one.shape)
        for one in tensors
    }


def cases(options: Options) -> list[Case]:
    """One worker, a checkpoint in the page cache."""
    return [
        Case(
            name="disk",
            payload=model_like(options.nbytes, tensors=options.tensors),
            receivers=1,
            ways=[DiskWay(), MemoryWay()],
            subject="disk",
            references={"memory": ("memory",)},
        )
    ]
