"""Benchmark cases of the ipc transport: whole rounds of `send_weights` against memcpy and other ways, in one run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weightwire.clients.fanout import FanoutClient
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource
from weightwire.testing.floors import memory_floors
from weightwire.testing.measure import Case, Options, Payload, Seat, Way, equal_tensors, model_like, round_figures
from weightwire.testing.worker_host import WorkerHost
from weightwire.testing.workers import RankClient
from weightwire.worker import Worker
from weightwire_ipc import sharing
from weightwire_ipc.bench_others import other_ways
from weightwire_ipc.messages import IPCTrainerInitInfo

_TINY = equal_tensors(20_000, 1024)


@dataclass(frozen=True, slots=True)
class Memory:
    """Physical memory of a process in bytes, files of disks apart.

    Attributes:
        private: What it has alone.
        shared: Of what it has mapped as others have, its equal part; the parts of all add up to the whole.
    """

    private: int
    shared: int

    @classmethod
    def of(cls, pid: int) -> Memory:
        """What the process takes now."""
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kibibytes = {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines[1:])}
        return cls((kibibytes["Pss_Anon"] + kibibytes["SwapPss"]) << 10, kibibytes["Pss_Shmem"] << 10)


Offer = tuple[str, int, Memory]
"""Address of a worker, its process, and its memory without a model."""


class IPCWay(Way):
    """A round of `send_weights`, with its control calls, vote and commit.

    Args:
        name: Name of the way.
        share: The sender's parameters lie in shared memory. All ways that send one module do or do not.
        adopt: Workers compute on exported memory. What memory all of them take together is reported then; it counts
            from before they have a model, so this must be the first way of its case.
        receivers: How many take part; None: all.
        payload: What is moved instead of the case's payload, from and to a module of its own.
        remarks: More extras.
        init: More fields of `IPCTrainerInitInfo`.
    """

    def __init__(
        self,
        name: str = "ipc",
        *,
        share: bool = False,
        adopt: bool = False,
        receivers: int | None = None,
        payload: Payload | None = None,
        remarks: Mapping[str, str] | None = None,
        **init: Any,
    ) -> None:
        self.name = name
        self._share = share
        self._adopt = adopt
        self._receivers = receivers
        self._payload = payload
        self._extras: dict[str, Any] = dict(remarks or {})
        self._init = init
        self._own: Seat | None = None

    def _seat(self, seat: Seat) -> Seat:
        """The seat that has the module."""
        if self._payload is None:
            return seat
        if self._own is None:
            self._own = Seat(rank=seat.rank, world=seat.world, payload=self._payload, directory=seat.directory)
        return self._own

    def _takes_part(self, seat: Seat) -> bool:
        return self._receivers is None or seat.rank <= self._receivers

    def offer(self, seat: Seat) -> Offer | None:
        """Host a worker."""
        if not self._takes_part(seat):
            return None
        empty = Memory.of(os.getpid())
        self._host = WorkerHost(Worker(self._seat(seat).model))
        return self._host.address, os.getpid(), empty

    def connect(self, seat: Seat, offers: list[Offer | None]) -> None:
        """Open the link."""
        if not seat.sends:
            return
        present = [offer for offer in offers if offer is not None]
        self._workers = {pid: empty for _, pid, empty in present}
        model = self._seat(seat).model
        if self._share:
            sharing.share(model)
        clients = [RankClient([address], [f"worker {place}"]) for place, (address, _, _) in enumerate(present)]
        info = IPCTrainerInitInfo(adopt=self._adopt, **self._init)
        self._trainer = WeightTransferTrainerFactory.trainer_init(
            info, client=FanoutClient(clients), source=ModuleSource(model)
        )

    def warm(self, seat: Seat) -> None:
        """Touch the module."""
        self.held(seat)

    def step(self, seat: Seat) -> dict[str, Any] | None:
        """Send once."""
        if not seat.sends:
            return None
        return {**round_figures(self._trainer.send_weights()), **self._extras}

    def held(self, seat: Seat) -> list[torch.Tensor]:
        """The module's parameters, where it takes part."""
        return self._seat(seat).tensors() if self._takes_part(seat) else []

    def digests(self, seat: Seat) -> list[str]:
        """Of the ranks that take part; weighs the workers meanwhile, for the next round's report."""
        if not self._takes_part(seat):
            return []
        if seat.sends and self._adopt:
            self._weigh_workers(self._seat(seat).payload.nbytes)
        return super().digests(seat)

    def _weigh_workers(self, copy: int) -> None:
        """Note what the workers take together, also in copies of the payload, which has `copy` bytes."""
        memory = [(Memory.of(pid), empty) for pid, empty in self._workers.items()]
        private = sum(now.private - empty.private for now, empty in memory)
        shared = sum(now.shared - empty.shared for now, empty in memory)
        self._extras["workers_private_bytes"], self._extras["workers_shared_bytes"] = private, shared
        self._extras["workers_copies"] = (private + shared) / copy

    def close(self, seat: Seat) -> None:
        """Leave."""
        if seat.sends:
            self._trainer.shutdown()
        elif self._takes_part(seat):
            self._host.close()


def cases(options: Options) -> list[Case]:
    """Shared and private sources, adopted memory, two workers, and thousands of tiny tensors."""
    model = model_like(options.nbytes, tensors=options.tensors)
    memcpy = {"memcpy": ("memcpy",), "memcpy_by_tensor": ("memcpy_by_tensor",)}
    others, skipped = other_ways()

    def case(name: str, receivers: int, *ways: Way, **references: tuple[str, ...]) -> Case:
        """A case over the model, against memcpy."""
        return Case(
            name=name,
            payload=model,
            receivers=receivers,
            ways=[*ways, *memory_floors()],
            subject="ipc",
            references={**memcpy, **references},
        )

    return [
        case("shared", 1, IPCWay(share=True)),
        case("private", 1, IPCWay(remarks=skipped), *others, others=tuple(way.name for way in others)),
        case("adopt_1to2", 2, IPCWay(share=True, adopt=True)),
        case("adopt_private_1to2", 2, IPCWay(adopt=True)),
        case("1to2", 2, IPCWay(share=True), IPCWay("one_worker", share=True, receivers=1), **{"1to1": ("one_worker",)}),
        Case(
            name="tiny",
            payload=_TINY,
            receivers=1,
            ways=[IPCWay(share=True), IPCWay("one_tensor", share=True, payload=equal_tensors(1, _TINY.nbytes))],
            subject="ipc",
            references={"one": ("one_tensor",)},
        ),
    ]
