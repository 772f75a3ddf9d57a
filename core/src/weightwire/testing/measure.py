"""Benchmarks: several ways of moving one payload, measured against each other in one run.

All ways of a case run on the same ranks (one thread each, touched pages) with the same payload, interleaved: every
round runs each way once, in an order that moves on by one, and medians are compared. Before each step the sender
changes every byte, and after it SHA-256 over everything must be equal on all ranks.

A transport contributes a module under entry-point group `weightwire.bench` with one function, `cases(options)`:

    class AcmeWay(Way):
        name = "acme"

        def offer(self, seat):                                   # on each receiver
            self.host = WorkerHost(Worker(seat.model))           # weightwire.testing.worker_host, weightwire.worker
            return self.host.address                             # to the sender

        def connect(self, seat, offers):                         # on all ranks at once
            if seat.sends:
                client = FanoutClient([RankClient([address], ["worker"]) for address in offers])
                source = ModuleSource(seat.model)
                self.trainer = WeightTransferTrainerFactory.trainer_init(AcmeInitInfo(), client=client, source=source)

        def step(self, seat):                                    # on all ranks at once, timed
            if seat.sends:
                report = self.trainer.send_weights()
                return {"commit_seconds": report.ranks[-1].seconds["commit"]}

        def close(self, seat):
            if seat.sends:
                self.trainer.shutdown()
            else:
                self.host.close()

    def cases(options: Options) -> list[Case]:
        payload = model_like(options.nbytes, tensors=options.tensors)
        references = {"raw": ("raw_broadcast", "raw_send"), "per_tensor": ("per_tensor_broadcast",)}
        ways = [AcmeWay(), *floors()]                            # weightwire.testing.floors
        return [Case(name="1to1", payload=payload, receivers=1, ways=ways, subject="acme", references=references)]

which yields the ratios `acme.1to1.raw` (over the faster of the two) and `acme.1to1.per_tensor`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from weightwire.report import TransferReport
from weightwire.testing import measure_rank
from weightwire.testing.measure_rank import Seat, Step, Way, Weight
from weightwire.testing.measure_report import Report, Run, machine
from weightwire.testing.payload import Payload, equal_tensors, model_like
from weightwire.testing.pool import Rank, RankPool

__all__ = [
    "Case",
    "Options",
    "Payload",
    "Report",
    "Run",
    "Seat",
    "Way",
    "equal_tensors",
    "measure",
    "model_like",
    "ratios_of",
    "round_figures",
    "run_bench",
]

_STEP_SECONDS = 300.0
_LEAD_SECONDS = 0.01
"""Between asking the ranks for a step and its beginning, so that all of them have heard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for.

    Attributes:
        nbytes: Size of the main payload in bytes.
        tensors: Number of its tensors.
        rounds: Timed rounds of every way.
        warmup: Rounds before them.
        memory: Whether to measure peak memory.
    """

    nbytes: int = 1 << 30
    tensors: int = 290
    rounds: int = 5
    warmup: int = 1
    memory: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Ways that are compared with each other.

    Attributes:
        name: Name within the transport, e.g. `"1to2"`.
        payload: What is moved.
        receivers: How many ranks receive.
        ways: The ways; names are unique.
        subject: Name of the way whose speed the ratios are about.
        references: Name of a ratio -> the ways it compares the subject with; the fastest of them counts.
        derive: More ratios from the case's runs by way; names must say what they are (`"share_of_bytes"`).
        rounds: Instead of `Options.rounds`.
    """

    name: str
    payload: Payload
    receivers: int
    ways: Sequence[Way]
    subject: str
    references: Mapping[str, Sequence[str]] = field(default_factory=dict)
    derive: Callable[[Mapping[str, Run]], Mapping[str, float]] | None = None
    rounds: int | None = None


Progress = Callable[[str], None]
"""Told in words what is being done."""


def run_bench(
    transport: str,
    cases: Sequence[Case],
    options: Options,
    *,
    pool: RankPool | None = None,
    progress: Progress = lambda words: None,
) -> Report:
    """Measure `cases` one after the other.

    Args:
        transport: First part of the names of ratios.
        cases: What to measure.
        options: Rounds and whether to weigh.
        pool: Where ranks come from; None makes one.
        progress: Told what is being done.

    Raises:
        BaseException: What a way raised, with the traceback of its rank.
    """
    report = Report(transport=transport, machine=machine())
    with RankPool() if pool is None else nullcontext(pool) as ranks:
        for case in cases:
            runs = measure(case, options, pool=ranks, progress=progress)
            report.payload[case.name] = case.payload.to_json()
            report.runs += runs
            report.ratios.update(ratios_of(transport, case, runs))
    return report


def measure(case: Case, options: Options, *, pool: RankPool, progress: Progress = lambda words: None) -> list[Run]:
    """Measure the ways of one case; returns a run for each, in their order.

    Raises:
        ValueError: Two ways with one name.
        BaseException: What a way raised, with the traceback of its rank.
    """
    names = [way.name for way in case.ways]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"case {case.name} has two ways called {', '.join(sorted(twice))}")
    weights: dict[str, list[Weight]] = {}
    for way in case.ways:
        if options.memory:
            progress(f"{case.name}: memory of {way.name}")
            weights[way.name] = _weigh(case, way, pool)
    rounds = case.rounds or options.rounds
    taken: dict[str, list[_Round]] = {name: [] for name in names}
    with _seated(case, case.ways, pool) as ranks:
        for number in range(options.warmup + rounds):
            progress(f"{case.name}: round {number + 1} of {options.warmup + rounds}")
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                taken[name].append(_round(ranks, name))
    return [_run_of(case, name, taken[name], warmup=options.warmup, weights=weights.get(name, [])) for name in names]


def round_figures(report: TransferReport) -> dict[str, Any]:
    """What a way that is a whole `send_weights` returns from its step: path, times, and bytes allocated."""
    workers = [rank for rank in report.ranks if "commit" in rank.seconds]
    return {
        "path": report.path,
        "transfer_seconds": report.seconds["transfer"],
        "exclusive_milliseconds": 1e3 * max(rank.seconds["commit"] + rank.seconds["vote"] for rank in workers),
        "commit_milliseconds": 1e3 * max(rank.seconds["commit"] for rank in workers),
        "allocated_bytes": max(rank.details["allocated_bytes"] for rank in workers),
    }


@dataclass(frozen=True, slots=True)
class _Round:
    seconds: float
    equal: bool
    extras: dict[str, Any]


def _round(ranks: Sequence[Rank], name: str) -> _Round:
    ranks[0].call(measure_rank.refresh, name, timeout=_STEP_SECONDS)
    at = time.monotonic() + _LEAD_SECONDS
    steps: list[Step] = _on_all(ranks, measure_rank.step, name, at)
    digests = [text for found in _on_all(ranks, measure_rank.digests, name) for text in found]
    return _Round(
        seconds=max(step.ended for step in steps) - min(step.began for step in steps),
        equal=len(set(digests)) == 1 and len(digests) > 1,
        extras={key: value for step in reversed(steps) for key, value in step.extras.items()},
    )


def _weigh(case: Case, way: Way, pool: RankPool) -> list[Weight]:
    with _seated(case, [way], pool) as ranks:
        weights: list[list[Weight]] = [
            _on_all(ranks, measure_rank.weighed_step, way.name) for _ in range(way.weighed_rounds)
        ]
    return [
        Weight(idle=per_rank[0].idle, peak=max(weight.peak for weight in per_rank))
        for per_rank in zip(*weights, strict=True)
    ]


@contextmanager
def _seated(case: Case, ways: Sequence[Way], pool: RankPool) -> Iterator[list[Rank]]:
    """Fresh ranks with the payload in place and `ways` connected."""
    ranks = pool.borrow(1 + case.receivers, fresh=True)
    try:
        with tempfile.TemporaryDirectory(prefix="weightwire-bench-") as directory:
            seats = [
                Seat(rank=rank.index, world=len(ranks), payload=case.payload, directory=directory) for rank in ranks
            ]
            calls = [rank.start(measure_rank.sit, seat) for rank, seat in zip(ranks, seats, strict=True)]
            for call in calls:
                call.result(_STEP_SECONDS)
            for way in ways:
                offers = _on_all(ranks[1:], measure_rank.offer, way)
                _on_all(ranks, measure_rank.connect, way, offers)
            yield ranks
            for way in ways:
                _on_all(ranks, measure_rank.close, way.name)
    finally:
        for rank in ranks:
            rank.kill()
        pool.give_back(ranks)


def _on_all(ranks: Sequence[Rank], function: Callable[..., Any], *args: Any) -> list[Any]:
    calls = [rank.start(function, *args) for rank in ranks]
    return [call.result(_STEP_SECONDS) for call in calls]


def _run_of(case: Case, name: str, rounds: Sequence[_Round], *, warmup: int, weights: Sequence[Weight]) -> Run:
    timed = rounds[warmup:]
    return Run(
        case=case.name,
        name=name,
        nbytes=case.payload.nbytes,
        seconds=[one.seconds for one in timed],
        bit_equal=all(one.equal for one in rounds),
        peak_memory={
            ("sender" if rank == 0 else f"receiver {rank}"): {"idle": weight.idle, "peak": weight.peak}
            for rank, weight in enumerate(weights)
        },
        extras=_settled([one.extras for one in timed]),
    )


def _settled(extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of what is a number in every round, the last value of anything else."""
    settled: dict[str, Any] = {}
    for key in {key: None for one in extras for key in one}:
        values = [one[key] for one in extras if key in one]
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        settled[key] = statistics.median(values) if numbers else values[-1]
    return settled


def ratios_of(transport: str, case: Case, runs: Sequence[Run]) -> dict[str, float]:
    """`transport.case.reference` -> the subject's speed over that of the fastest way of the reference.

    Raises:
        ValueError: A reference names a way that the case does not have.
    """
    by_name = {run.name: run for run in runs}
    found: dict[str, float] = {}
    for reference, names in case.references.items():
        if unknown := {case.subject, *names} - by_name.keys():
            raise ValueError(f"case {case.name} has no way {', '.join(sorted(unknown))}")
        fastest = min(by_name[name].median for name in names)
        found[f"{transport}.{case.name}.{reference}"] = fastest / by_name[case.subject].median
    for name, value in (case.derive(by_name) if case.derive else {}).items():
        found[f"{transport}.{case.name}.{name}"] = value
    return found
