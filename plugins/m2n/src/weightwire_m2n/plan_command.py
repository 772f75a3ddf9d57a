"""`weightwire plan`: what a reshard costs, from the layouts of both sides, before anything moves."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from weightwire.errors import UpdateRefused, WeightwireError
from weightwire.layout import ParamMeta
from weightwire.load_plan import LoadPlan
from weightwire.plan_building import plan_of_pieces
from weightwire.resharding.planner import Plan
from weightwire_m2n.layout_files import (
    SOURCE_FILE,
    WORKERS_FILE,
    check_layouts,
    read_source_layout,
    read_worker_layouts,
)
from weightwire_m2n.messages import BUFFER_BYTES, M2NTrainerInitInfo
from weightwire_m2n.plan_picture import draw, figure_class
from weightwire_m2n.plan_report import PlanReport, report
from weightwire_m2n.plan_text import text
from weightwire_m2n.planning import make_plan


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: What follows its name.

    Returns:
        0; 1 where an update would be refused, since nobody takes a parameter; 2 where the call or a file is wrong.
    """
    parser = _parser()
    try:
        options = parser.parse_args(list(arguments))
        if options.parameter is not None and options.png is None:
            parser.error("--parameter is the one to draw: say where with --png FILE")
    except SystemExit as exit_:  # argparse has said what is wrong, or what it was asked
        return int(exit_.code or 0)
    collects = gc.isenabled()
    gc.disable()  # there is little garbage among what may be millions of objects
    try:
        return _run(options)
    except WeightwireError as error:
        words = " ".join(str(error).split())
        print(f"weightwire plan: {words}", file=sys.stderr)
        if options.json:
            print(json.dumps({"error": {"type": type(error).__name__, "message": words}}, indent=2))
        return 2
    finally:
        if collects:
            gc.enable()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weightwire plan", description=__doc__)
    parser.add_argument(
        "source", type=Path, help=f"the trainers' layout, or a directory with {SOURCE_FILE} and {WORKERS_FILE} in it"
    )
    parser.add_argument("workers", type=Path, nargs="?", help="the workers' layouts")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the traffic, and one parameter on both sides")
    parser.add_argument("--parameter", metavar="NAME", help="the one to draw: by default the largest that is sharded")
    parser.add_argument("--speed", type=_speed, default=10.0, metavar="GIB_PER_S", help="of a rank; %(default)g")
    parser.add_argument(
        "--buffer", type=int, default=BUFFER_BYTES, metavar="BYTES", help="the engine's buffer_bytes; %(default)d"
    )
    parser.add_argument("--no-strict", dest="strict", action="store_false", help="let parameters be that nobody takes")
    parser.add_argument(
        "--foreign", action="append", default=[], metavar="NAME", help="a parameter that nobody has to take; repeatable"
    )
    return parser


def _speed(given: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(given) < math.inf:
            return float(given)
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {given!r}")


def _run(options: argparse.Namespace) -> int:
    if options.png is not None:
        figure_class()  # what is missing is told before the work is done
    source, workers = options.source, options.workers
    if workers is None:
        source, workers = source / SOURCE_FILE, source / WORKERS_FILE
    metadata, trainers = read_source_layout(source)
    plans = read_worker_layouts(workers)
    check_layouts(metadata, plans)
    plan, found = _planned(metadata, trainers, plans, options)
    refused = _refused(plan, options)
    if options.png is not None:
        draw(options.png, plan, found, options.parameter)
    if options.json:
        print(json.dumps(found.to_json() | {"refused": refused}, indent=2))
    else:
        print(text(found))
    if refused is not None:
        print(f"weightwire plan: {refused}", file=sys.stderr)
    return int(refused is not None)


def _planned(
    metadata: Sequence[ParamMeta], trainers: int, plans: Sequence[LoadPlan], options: argparse.Namespace
) -> tuple[Plan, PlanReport]:
    sizes = M2NTrainerInitInfo(buffer_bytes=options.buffer)
    distinct = {id(each): each for each in plans}
    # What opaque modules take is asked for in full, as a worker asks for it.
    landing = {key: plan_of_pieces(each) if each.opaque else each for key, each in distinct.items()}
    begin = time.perf_counter()
    plan = make_plan(metadata, trainers, [landing[id(each)] for each in plans], sizes)
    seconds = time.perf_counter() - begin
    return plan, report(plan, plans, speed=options.speed, planning_seconds=seconds)


def _refused(plan: Plan, options: argparse.Namespace) -> str | None:
    """Why an update would be refused."""
    try:
        plan.coverage.check(strict=options.strict, foreign=options.foreign)
    except UpdateRefused as error:
        return str(error)
    return None
