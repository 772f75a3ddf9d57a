"""Benchmark cases of sharded_rdt: whole rounds of `send_weights` against plain NIXL reads between the same processes.

nixl   one trainer rank, one worker, over NIXL
ray    the same over Ray's own direct transport
auto   the same over what is chosen, against Ray's object store
gloo   the same over gloo
object_store   the same through Ray's object store
2to2   two trainer ranks with shards, two tensor-parallel workers
4to2   four trainer ranks
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from weightwire.clients.fanout import FanoutClient
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource
from weightwire.testing.measure import Case, Options, Report, Seat, Way, model_like, round_figures, run_bench
from weightwire.testing.worker_host import WorkerHost
from weightwire.testing.workers import RankClient
from weightwire.worker import Worker
from weightwire_rdt import bench_fleet
from weightwire_rdt.bench_nixl import RawNixl
from weightwire_rdt.bench_ray import RawRay
from weightwire_rdt.local_cluster import LocalCluster
from weightwire_rdt.messages import ShardedRDTTrainerInitInfo, TensorTransport

_ROOM: Final = 128 << 20
_FLEETS: Final = {"2to2": (2, 2), "4to2": (4, 2)}
_PAIRS: Final[Mapping[str, tuple[TensorTransport, str]]] = {
    "nixl": ("nixl", "raw_nixl"),
    "ray": ("ray_nixl", "raw_ray_nixl"),
    "auto": ("auto", "raw_object_store"),
    "gloo": ("gloo", "raw_nixl"),
    "object_store": ("object_store", "raw_object_store"),
}
"""Of each case of one trainer rank and one worker the transport, and what it is held against."""
CASES: Final = (*_PAIRS, *_FLEETS)


class RDTWay(Way):
    """A round of `send_weights`, with its control calls, vote and commit.

    Args:
        transport: How bytes travel.
    """

    def __init__(self, transport: TensorTransport) -> None:
        self.name = f"rdt_{transport}"
        self._transport = transport

    def offer(self, seat: Seat) -> str:
        """Host a worker."""
        self._host = WorkerHost(Worker(seat.model))
        return self._host.address

    def connect(self, seat: Seat, offers: list[str]) -> None:
        """Open the link."""
        if seat.sends:
            clients = [RankClient([address], [f"worker {place}"]) for place, address in enumerate(offers)]
            self._trainer = WeightTransferTrainerFactory.trainer_init(
                ShardedRDTTrainerInitInfo(tensor_transport=self._transport),
                client=FanoutClient(clients),
                source=ModuleSource(seat.model),
            )

    def step(self, seat: Seat) -> dict[str, Any] | None:
        """Send once."""
        if not seat.sends:
            return None
        report = self._trainer.send_weights()
        pulled = sum(rank.bytes for rank in report.ranks if "commit" in rank.seconds)
        return {**round_figures(report), "pulled_bytes": pulled}

    def close(self, seat: Seat) -> None:
        """Leave."""
        if seat.sends:
            self._trainer.shutdown()
        else:
            self._host.close()


def run(options: Options, cases: Sequence[str] | None, progress: Callable[[str], None]) -> Report:
    """Measure `cases`, all if None, in a Ray cluster that lives as long.

    Returns:
        With the ratios `rdt.bytes.needed` (bytes pulled over bytes that the workers load); `rdt.nixl.raw`,
        `rdt.gloo.raw`, `rdt.2to2.raw` and `rdt.4to2.raw` (speeds over plain NIXL reads by as many processes);
        `rdt.ray.raw` (over Ray's direct transport by itself); `rdt.auto.object_store` and `rdt.object_store.raw` (over
        tensors that go through Ray's object store as they are).
    """
    wanted = cases or CASES
    with LocalCluster(object_store_bytes=2 * options.nbytes + _ROOM) as cluster:
        before = dict(os.environ)
        os.environ.update(cluster.variables)
        try:
            pairs = [_one_to_one(case, options) for case in wanted if case in _PAIRS]
            report = run_bench("rdt", pairs, options, progress=progress)
            _add_bytes(report)
            for case in wanted:
                if case in _FLEETS:
                    bench_fleet.measure(report, case, *_FLEETS[case], options, progress)
        finally:
            os.environ.clear()
            os.environ.update(before)
    return report


def _one_to_one(case: str, options: Options) -> Case:
    transport, raw = _PAIRS[case]
    against = RawNixl() if raw == RawNixl.name else RawRay(raw)
    return Case(
        name=case,
        payload=model_like(options.nbytes, tensors=options.tensors),
        receivers=1,
        ways=[RDTWay(transport), against],
        subject=f"rdt_{transport}",
        references={raw.removeprefix("raw_") if case == "auto" else "raw": (raw,)},
    )


def _add_bytes(report: Report) -> None:
    for run in report.runs:
        if run.name == "rdt_nixl":
            report.ratios["rdt.bytes.needed"] = run.extras["pulled_bytes"] / run.nbytes
