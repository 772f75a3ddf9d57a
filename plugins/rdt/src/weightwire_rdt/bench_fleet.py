"""The benchmark from shards to tensor-parallel workers: the transport, and plain reads of as many bytes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from weightwire.recording import record_loads
from weightwire.resharding.load_plans import workers_of
from weightwire.resharding.planner import Plan
from weightwire.resharding.source_layout import SourceLayout
from weightwire.testing import sharded_ranks
from weightwire.testing.measure import Options, Report, Run, model_like
from weightwire.testing.payload import Payload
from weightwire.testing.pool import Rank, RankPool
from weightwire.testing.sharded_payload import TensorParallel, metadata_of
from weightwire_rdt.bench_nixl import announce, begin, hear, read, wait_for
from weightwire_rdt.messages import ShardedRDTTrainerInitInfo
from weightwire_rdt.nixl_agent import process_agent, span_of

State = dict[str, Any]
_SECONDS: Final = 300.0
_BOX: Final = "raw"


def measure(
    report: Report, case: str, trainers: int, workers: int, options: Options, progress: Callable[[str], None]
) -> None:
    """Add a fleet's runs and the ratio `rdt.<case>.raw` to a report."""
    payload = model_like(options.nbytes, tensors=options.tensors)
    report.payload[case] = payload.to_json()
    with RankPool() as pool, tempfile.TemporaryDirectory(prefix="weightwire-bench-") as directory:
        ranks = pool.borrow(trainers + workers, fresh=True)
        try:
            progress(f"{case}: making the model")
            bound = _seat(ranks, payload, directory, trainers, workers)
            runs = _rounds(case, ranks, payload, options, progress)
            _on_all(ranks, sharded_ranks.close)
        finally:
            for rank in ranks:
                rank.kill()
            pool.give_back(ranks)
    report.runs += runs.values()
    report.ratios[f"rdt.{case}.raw"] = runs["raw_nixl"].median / runs["rdt_nixl"].median
    report.ratios[f"rdt.{case}.bytes_needed"] = runs["rdt_nixl"].extras["wire_bytes"] / bound


def _seat(ranks: Sequence[Rank], payload: Payload, directory: str, trainers: int, workers: int) -> int:
    """Make the model on all ranks and connect; returns the fewest bytes that can be pulled."""
    calls = [rank.start(sharded_ranks.take_seat, payload, place, trainers, workers) for place, rank in enumerate(ranks)]
    addresses = [address for call in calls if (address := call.result(_SECONDS)) is not None]
    port = ranks[0].call(sharded_ranks.hold_port)
    info = ShardedRDTTrainerInitInfo
    connecting = [rank.start(sharded_ranks.connect, addresses, port, info) for rank in ranks[:trainers]]
    for call in connecting:
        call.result(_SECONDS)
    plan = _plan(payload, trainers, workers)
    traffic = plan.traffic().tolist()
    _on_all(ranks, prepare_raw, traffic, directory)
    return plan.coverage.lower_bound


def _plan(payload: Payload, trainers: int, workers: int) -> Plan:
    metadata = metadata_of(payload, trainers)
    with torch.device("meta"):
        plans = [record_loads(TensorParallel(payload, place, workers), metadata) for place in range(workers)]
    return Plan([SourceLayout.of(meta) for meta in metadata], trainers, workers_of(plans, metadata))


def prepare_raw(state: State, traffic: Sequence[Sequence[int]], directory: str) -> None:
    """Memory for as many bytes as cross between this rank and each peer, registered and read once."""
    agent, rank, trainers = process_agent(), state["rank"], state["trainers"]
    agent.open_box(_BOX)
    where = Path(directory)
    state["raw"] = peers = {}
    for trainer, row in enumerate(traffic):
        for worker, nbytes in enumerate(row):
            if nbytes and rank in (trainer, trainers + worker):
                mine = torch.zeros(nbytes, dtype=torch.uint8)
                announce(agent, [mine], where / f"raw-{rank}-{trainer}-{worker}.json")
                other = trainers + worker if rank == trainer else trainer
                peers[other] = mine, *hear(agent, where / f"raw-{other}-{trainer}-{worker}.json")
    begin(agent, _BOX, others=[name for _, name, _ in peers.values()], sends=rank < trainers)
    raw(state)


def raw(state: State) -> None:
    """Read as many bytes from each trainer rank, in one transfer each; or be read from."""
    agent, peers = process_agent(), state["raw"]
    if state["rank"] < state["trainers"]:
        wait_for(agent, _BOX, len(peers))
    else:
        read(agent, [(name, [span_of(mine)], there) for mine, name, there in peers.values()], _BOX)


_WAYS: Final[Mapping[str, Callable[[State], Mapping[str, Any] | None]]] = {
    "rdt_nixl": sharded_ranks.send,
    "raw_nixl": raw,
}


def step(state: State, way: str, at: float) -> tuple[float, float, Mapping[str, Any]]:
    """One timed step, beginning at `at`."""
    return sharded_ranks.timed(state, _WAYS[way], at)


def _rounds(
    case: str, ranks: Sequence[Rank], payload: Payload, options: Options, progress: Callable[[str], None]
) -> dict[str, Run]:
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    figures: list[Mapping[str, Any]] = []
    same = True
    warmup = options.warmup + 1  # both sets of a worker's storage have to be touched
    for number in range(warmup + options.rounds):
        progress(f"{case}: round {number + 1} of {warmup + options.rounds}")
        for way in list(_WAYS)[:: 1 if number % 2 else -1]:
            _on_all(ranks, sharded_ranks.refresh)
            steps = _on_all(ranks, step, way, time.monotonic() + 0.02)
            if way == "rdt_nixl":
                same &= all(_on_all(ranks, sharded_ranks.equal))
                figures.append(steps[0][2])
            if number >= warmup:
                seconds[way].append(max(one[1] for one in steps) - min(one[0] for one in steps))
    extras = {
        key: statistics.median(one[key] for one in figures[warmup:]) if isinstance(value, int | float) else value
        for key, value in figures[-1].items()
    }
    return {
        way: Run(
            case=case,
            name=way,
            nbytes=payload.nbytes,
            seconds=seconds[way],
            bit_equal=same or way == "raw_nixl",
            peak_memory={},
            extras=extras if way == "rdt_nixl" else {},
        )
        for way in _WAYS
    }


def _on_all(ranks: Sequence[Rank], function: Callable[..., Any], *args: Any) -> list[Any]:
    calls = [rank.start(function, *args) for rank in ranks]
    return [call.result(_SECONDS) for call in calls]
