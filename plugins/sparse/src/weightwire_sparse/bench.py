"""Benchmark of deltas: finding what changed, whole rounds against dense ones, and applying on models of two sizes.

find                finding 1 % of random changes, in one process, against copying the model
round_1pct          whole rounds with 1 % of random changes, compiled kernels and numpy, against dense rounds of `nccl`
round_0.1pct        the same with a tenth of that
round_1pct_1gbit    the same over connections that carry 1 Gbit/s
rows, all           whole rows of which 1 % changed, and everything changed
apply               applying as many changes to a model of twice the size
overlap             finding while the optimiser runs
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from weightwire.testing.measure import Case, Options, Report, Run, Way, measure, model_like
from weightwire.testing.measure_report import machine
from weightwire.testing.pool import Rank, RankPool
from weightwire_sparse import bench_find
from weightwire_sparse.bench_ways import RoundWay

CASES: Final = ("find", "round_1pct", "round_0.1pct", "round_1pct_1gbit", "rows", "all", "apply", "overlap")
_GIGABIT: Final = 125_000_000
_DENSE: Final = "dense_nccl"
_SECONDS: Final = 300.0
_ROUNDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "round_1pct": {"change": "random", "share": 0.01},
    "round_0.1pct": {"change": "random", "share": 0.001},
    "round_1pct_1gbit": {"change": "random", "share": 0.01, "wire": _GIGABIT},
    "rows": {"change": "rows", "share": 0.01},
    "all": {"change": "all", "share": 1.0},
}


def run(options: Options, cases: Sequence[str] | None, progress: Callable[[str], None]) -> Report:
    """Measure `cases`, all if None.

    Returns:
        With ratios of speeds: `sparse.find.memcpy` and `sparse.find_fast.memcpy` over one copy of as much memory (and
        `.copy` over copying the model's tensors), `sparse.round_1pct.dense_nccl`, `sparse.round_1pct.dense_1gbit`, and
        the same of numpy's kernels with `_numpy` after the case; of bytes: `sparse.bytes_1pct.dense`, what travels over
        the dense bytes; of times: `sparse.apply_2x.1x`, and `sparse.overlap.after`, an optimiser step with the find
        after it over one with the find beside it.
    """
    report = Report(transport="sparse", machine=machine())
    with RankPool() as pool:
        for case in cases or CASES:
            if case in _ROUNDS:
                _rounds(report, case, options, pool, progress)
            else:
                _OTHERS[case](report, options, pool, progress)
    return report


def _kernels() -> list[str]:
    """What can be measured here, the fastest first."""
    return ["numba", "numpy"] if importlib.util.find_spec("numba") else ["numpy"]


def _rounds(report: Report, case: str, options: Options, pool: RankPool, progress: Callable[[str], None]) -> None:
    how = _ROUNDS[case]
    ways: list[Way] = [
        RoundWay(f"sparse_{kernels}", "sparse_nccl", kernels=kernels, verify_every=0, **how) for kernels in _kernels()
    ]
    ways.append(RoundWay(_DENSE, "nccl", **how))
    payload = model_like(options.nbytes, tensors=options.tensors)
    found = Case(name=case, payload=payload, receivers=1, ways=ways, subject=ways[0].name)
    # A first dense round, and what messages and the history need has to be touched.
    options = replace(options, warmup=options.warmup + 2)
    runs = {one.name: one for one in measure(found, options, pool=pool, progress=progress)}
    report.payload[case] = payload.to_json()
    report.runs += runs.values()
    dense, name = runs[_DENSE], case.removesuffix("_1gbit")
    reference = "dense_1gbit" if case.endswith("_1gbit") else _DENSE
    for kernels in reversed(_kernels()):
        one = runs[f"sparse_{kernels}"]
        suffix = "" if kernels == _kernels()[0] else f"_{kernels}"
        report.ratios[f"sparse.{name}{suffix}.{reference}"] = dense.median / one.median
        if reference == _DENSE:
            share = name.removeprefix("round_")
            report.ratios[f"sparse.bytes_{share}.dense"] = one.extras["wire_bytes"] / payload.nbytes


def _apply(report: Report, options: Options, pool: RankPool, progress: Callable[[str], None]) -> None:
    """As many changes in a model of half the size as in one of the whole."""
    runs: dict[int, Run] = {}
    for parts in (2, 1):
        payload = model_like(options.nbytes // parts, tensors=options.tensors)
        way = RoundWay("sparse", "sparse_nccl", change="random", share=0.005 * parts, verify_every=0)
        case = Case(name=f"apply_{2 // parts}x", payload=payload, receivers=1, ways=[way], subject="sparse")
        (runs[parts],) = measure(case, replace(options, warmup=options.warmup + 2), pool=pool, progress=progress)
        report.payload[case.name] = payload.to_json()
        report.runs.append(runs[parts])
    twice, once = (runs[parts].extras["apply_milliseconds"] for parts in (1, 2))
    report.ratios["sparse.apply_2x.1x"] = twice / once


def _find(report: Report, options: Options, pool: RankPool, progress: Callable[[str], None]) -> None:
    """Finding 1 % of random changes, beside copying as much memory in one piece, and the model's own tensors."""
    payload = model_like(options.nbytes, tensors=options.tensors)
    ways = ["memcpy", "copy", *_kernels()]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, list[int]] = {way: [] for way in ways}
    with _alone(pool) as rank:
        rank.call(bench_find.sit, payload, _kernels(), timeout=_SECONDS)
        for number in range(options.warmup + 1 + options.rounds):
            progress(f"find: round {number + 1}")
            shift = number % len(ways)
            for way in ways[shift:] + ways[:shift]:
                took, count = rank.call(bench_find.step, way, timeout=_SECONDS)
                if number > options.warmup:
                    seconds[way].append(took)
                    found[way].append(count)
    report.payload["find"] = payload.to_json()
    runs = {
        way: Run(
            case="find",
            name=way,
            nbytes=payload.nbytes,
            seconds=seconds[way],
            bit_equal=True,
            extras={"found": found[way][-1]},
        )
        for way in ways
    }
    report.runs += runs.values()
    for kernels in _kernels():
        name = "find_fast" if kernels == "numba" else "find"
        for reference in ("memcpy", "copy"):
            report.ratios[f"sparse.{name}.{reference}"] = runs[reference].median / runs[kernels].median


def _overlap(report: Report, options: Options, pool: RankPool, progress: Callable[[str], None]) -> None:
    """An optimiser step and a find, one after the other, and side by side."""
    payload = model_like(options.nbytes // 4, tensors=options.tensors)
    taken: dict[str, list[dict[str, float]]] = {"after": [], "ahead": []}
    with _alone(pool) as rank:
        rank.call(bench_find.sit_and_train, payload, timeout=_SECONDS)
        for number in range(options.warmup + options.rounds):
            progress(f"overlap: round {number + 1}")
            for way in ("after", "ahead") if number % 2 else ("ahead", "after"):
                figures = rank.call(bench_find.train, way == "ahead", timeout=_SECONDS)
                if number >= options.warmup:
                    taken[way].append(figures)
    report.payload["overlap"] = payload.to_json()
    runs = {
        way: Run(
            case="overlap",
            name=way,
            nbytes=payload.nbytes,
            seconds=[one["seconds"] for one in figures],
            bit_equal=True,
            extras={key: statistics.median(one[key] for one in figures) for key in figures[0]},
        )
        for way, figures in taken.items()
    }
    report.runs += runs.values()
    report.ratios["sparse.overlap.after"] = runs["after"].median / runs["ahead"].median


@contextmanager
def _alone(pool: RankPool) -> Iterator[Rank]:
    ranks = pool.borrow(1, fresh=True)
    try:
        yield ranks[0]
    finally:
        ranks[0].kill()
        pool.give_back(ranks)


_OTHERS: Final[Mapping[str, Callable[[Report, Options, RankPool, Callable[[str], None]], None]]] = {
    "find": _find,
    "apply": _apply,
    "overlap": _overlap,
}
