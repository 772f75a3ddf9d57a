"""Benchmark cases of the nccl transport: whole rounds of `send_weights` against raw gloo on the same ranks."""

from __future__ import annotations

from typing import Any

from weightwire.clients.fanout import FanoutClient
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource
from weightwire.testing.floors import floors
from weightwire.testing.measure import Case, Options, Seat, Way, equal_tensors, model_like, round_figures
from weightwire.testing.worker_host import WorkerHost
from weightwire.testing.workers import RankClient
from weightwire.worker import Worker
from weightwire_nccl.messages import NCCLTrainerInitInfo


class NCCLWay(Way):
    """A round of `send_weights`, with its control calls, vote and commit.

    Args:
        name: Name of the way.
        init: Fields of `NCCLTrainerInitInfo`.
    """

    def __init__(self, name: str = "nccl", **init: Any) -> None:
        self.name = name
        self._init = init

    def offer(self, seat: Seat) -> str:
        """Host a worker."""
        self._host = WorkerHost(Worker(seat.model))
        return self._host.address

    def connect(self, seat: Seat, offers: list[str]) -> None:
        """Open the link."""
        if seat.sends:
            clients = [RankClient([address], [f"worker {place}"]) for place, address in enumerate(offers)]
            self._trainer = WeightTransferTrainerFactory.trainer_init(
                NCCLTrainerInitInfo(**self._init), client=FanoutClient(clients), source=ModuleSource(seat.model)
            )

    def step(self, seat: Seat) -> dict[str, Any] | None:
        """Send once."""
        if not seat.sends:
            return None
        return round_figures(self._trainer.send_weights())

    def close(self, seat: Seat) -> None:
        """Leave."""
        if seat.sends:
            self._trainer.shutdown()
        else:
            self._host.close()


def cases(options: Options) -> list[Case]:
    """One worker, two workers, and thousands of tiny tensors."""
    model = model_like(options.nbytes, tensors=options.tensors)
    raw = {"raw": ("raw_broadcast", "raw_send")}
    return [
        Case(
            name="1to1",
            payload=model,
            receivers=1,
            ways=[NCCLWay(), NCCLWay("nccl_collective", collective=True), *floors()],
            subject="nccl",
            references={**raw, "per_tensor": ("per_tensor_broadcast",), "collective": ("nccl_collective",)},
        ),
        Case(name="1to2", payload=model, receivers=2, ways=[NCCLWay(), *floors()], subject="nccl", references=raw),
        Case(
            name="tiny",
            payload=equal_tensors(20_000, 1024),
            receivers=1,
            ways=[NCCLWay(), *floors()],
            subject="nccl",
            references={"per_tensor": ("per_tensor_broadcast",)},
        ),
    ]
