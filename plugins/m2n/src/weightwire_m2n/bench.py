"""Benchmark of the direct reshard, and of planning one for a model of a trillion parameters.

4to2               four trainer ranks to two tensor-parallel workers, against the same bytes raw, and against
                   gathering each parameter and broadcasting it
plan_1t_256x128    planning on one rank, in a process of its own, since memory is that of the process
plan_1t_1024x512   the same for four times the ranks
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from weightwire.testing import sharded_ranks
from weightwire.testing.measure import Options, Report, Run, model_like
from weightwire.testing.measure_report import machine
from weightwire.testing.payload import Payload
from weightwire.testing.pool import Rank, RankPool
from weightwire.testing.sharded_payload import TensorParallel, metadata_of
from weightwire_m2n import bench_fleet as fleet
from weightwire_m2n.messages import M2NTrainerInitInfo
from weightwire_m2n.planning import make_plan

CASES: Final = ("4to2", "plan_1t_256x128", "plan_1t_1024x512")
_TRAINERS, _WORKERS = 4, 2
_WAYS: Final = ("m2n", "raw", "gather_broadcast")
_FLEETS: Final = {
    "plan_1t_256x128": ("--trainers", "256", "--expert-ranks", "32", "--replicas", "4"),
    "plan_1t_1024x512": ("--trainers", "1024", "--expert-ranks", "64", "--replicas", "8"),
}
_SECONDS: Final = 300.0


def run(options: Options, cases: Sequence[str] | None, progress: Callable[[str], None]) -> Report:
    """Measure `cases`, all if None.

    Returns:
        With the ratios `m2n.bytes.lower_bound` (bytes on the wire over the fewest that can be), `m2n.4to2.raw` and
        `m2n.4to2.gather_broadcast` (speeds), and the figures `m2n.plan_1t_*.seconds` and `.mebibytes`.
    """
    report = Report(transport="m2n", machine=machine())
    for case in cases or CASES:
        if case in _FLEETS:
            progress(f"{case}: planning")
            _plan(report, case, options.rounds)
        else:
            _four_to_two(report, options, progress)
    return report


def _plan(report: Report, case: str, rounds: int) -> None:
    command = [sys.executable, "-m", "weightwire_m2n.bench_planning", *_FLEETS[case]]
    found = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout)
        for _ in range(min(rounds, 3))
    ]
    middle = sorted(found, key=lambda one: float(one["seconds"]))[len(found) // 2]
    report.ratios[f"m2n.{case}.seconds"] = middle["seconds"]
    report.ratios[f"m2n.{case}.mebibytes"] = middle["peak_mib"]
    report.payload[case] = {"name": f"{middle['tensors']} tensors of a trillion parameters", "bytes": 2 * 10**12}
    report.runs.append(
        Run(
            case=case,
            name="plan",
            nbytes=2 * 10**12,
            seconds=[one["seconds"] for one in found],
            bit_equal=len({one["digest"] for one in found}) == 1,
            peak_memory={"rank": {"idle": middle["input_mib"] << 20, "peak": middle["peak_mib"] << 20}},
            extras=middle,
        )
    )


def _four_to_two(report: Report, options: Options, progress: Callable[[str], None]) -> None:
    payload = model_like(options.nbytes, tensors=options.tensors)
    report.payload["4to2"] = payload.to_json()
    with RankPool() as pool, tempfile.TemporaryDirectory(prefix="weightwire-bench-") as directory:
        ranks = pool.borrow(_TRAINERS + _WORKERS, fresh=True)
        try:
            progress("4to2: making the model")
            traffic, bound = _seat(ranks, payload, directory)
            runs = _rounds(ranks, payload, options, progress)
            _on_all(ranks, sharded_ranks.close)
        finally:
            for rank in ranks:
                rank.kill()
            pool.give_back(ranks)
    report.runs += runs.values()
    wire = runs["m2n"].extras["wire_bytes"]
    assert wire == sum(map(sum, traffic)), "workers count what the plan says"
    report.ratios["m2n.bytes.lower_bound"] = wire / bound
    for reference in ("raw", "gather_broadcast"):
        report.ratios[f"m2n.4to2.{reference}"] = runs[reference].median / runs["m2n"].median


def _seat(ranks: Sequence[Rank], payload: Payload, directory: str) -> tuple[list[list[int]], int]:
    """Make the model on all ranks and connect; returns the bytes between them, and the fewest that can be."""
    calls = [rank.start(fleet.sit, payload, place, _TRAINERS, _WORKERS, directory) for place, rank in enumerate(ranks)]
    addresses = [address for call in calls if (address := call.result(_SECONDS)) is not None]
    port = ranks[0].call(sharded_ranks.hold_port)
    _on_all(ranks[:_TRAINERS], sharded_ranks.connect, addresses, port, M2NTrainerInitInfo)
    metadata = metadata_of(payload, _TRAINERS)
    plans = [_load_plan(payload, place, metadata) for place in range(_WORKERS)]
    plan = make_plan(metadata, _TRAINERS, plans, M2NTrainerInitInfo())
    traffic = plan.traffic().tolist()
    _on_all(ranks, fleet.make_buffers, traffic)
    return traffic, plan.coverage.lower_bound


def _load_plan(payload: Payload, place: int, metadata: Sequence[Any]) -> Any:
    import torch

    from weightwire.recording import record_loads

    with torch.device("meta"):
        return record_loads(TensorParallel(payload, place, _WORKERS), metadata)


def _rounds(
    ranks: Sequence[Rank], payload: Payload, options: Options, progress: Callable[[str], None]
) -> dict[str, Run]:
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    same = dict.fromkeys(_WAYS, True)
    figures: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    warmup = options.warmup + 1  # both sets of a worker's storage have to be touched
    for number in range(warmup + options.rounds):
        progress(f"4to2: round {number + 1} of {warmup + options.rounds}")
        shift = number % len(_WAYS)
        for way in _WAYS[shift:] + _WAYS[:shift]:
            _on_all(ranks, sharded_ranks.refresh)
            steps = _on_all(ranks, fleet.step, way, time.monotonic() + 0.02)
            same[way] &= all(_on_all(ranks, fleet.equal, way))
            if number >= warmup:
                seconds[way].append(max(step[1] for step in steps) - min(step[0] for step in steps))
                figures[way].append(dict(steps[0][2]))
    return {
        way: Run(
            case="4to2",
            name=way,
            nbytes=payload.nbytes,
            seconds=seconds[way],
            bit_equal=same[way],
            peak_memory={},
            extras=_settled(figures[way]),
        )
        for way in _WAYS
    }


def _settled(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: statistics.median(one[key] for one in figures) if isinstance(value, int | float) else value
        for key, value in figures[-1].items()
    }


def _on_all(ranks: Sequence[Rank], function: Callable[..., Any], *args: Any) -> list[Any]:
    calls = [rank.start(function, *args) for rank in ranks]
    return [call.result(_SECONDS) for call in calls]
