"""`weightwire check NAME`: the kit without pytest, as a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weightwire.errors import WeightwireError
from weightwire.registry import engine_class
from weightwire.testing.conformance.catalogue import CHECKS
from weightwire.testing.conformance.check import GROUPS, Check
from weightwire.testing.conformance.judging import Nonconforming
from weightwire.testing.conformance.stage import Stage
from weightwire.testing.conformance.subject import TransportUnderTest
from weightwire.testing.pool import Rank, RankPool


@dataclass(frozen=True, slots=True)
class Result:
    """How one check came out.

    Attributes:
        group: Its group.
        check: Its name.
        outcome: What became of it.
        seconds: How long it took.
        words: Why it failed or was skipped.
    """

    group: str
    check: str
    outcome: Literal["ok", "failed", "skipped"]
    seconds: float = 0.0
    words: str = ""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 0 if the transport conforms, 1 if not, 2 if the call is wrong."""
    options = _parser().parse_args(arguments)
    try:
        subject = _subject(options)
    except (WeightwireError, ValueError, TypeError) as error:
        print(f"weightwire check: {error}", file=sys.stderr)
        return 2
    chosen = [check for check in CHECKS if check.group in (options.group or GROUPS)]
    results = []
    width = max(len(check.name) for check in chosen)
    for result in run(chosen, subject, everything=options.all):
        results.append(result)
        if not options.json:
            print(f"{result.group:8}  {result.check:{width}}  {result.outcome:7}  {result.seconds:5.1f} s", flush=True)
            if result.words:
                print(textwrap.indent(result.words, "    "), flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
    else:
        print(_summary(options.name, results))
    return int(any(result.outcome == "failed" for result in results))


def run(checks: Sequence[Check], subject: TransportUnderTest, *, everything: bool = False) -> Iterator[Result]:
    """Run checks one after the other, each with clean rank processes.

    Args:
        checks: Which.
        subject: The transport.
        everything: Whether expensive ones are run too.

    Yields:
        The result of each, as it comes.
    """
    with RankPool() as pool:
        for check in checks:
            lent: list[Rank] = []

            def lend(count: int, lent: list[Rank] = lent) -> list[Rank]:
                more = pool.borrow(count)
                lent.extend(more)
                return more

            yield _result(check, Stage(subject, lend), everything=everything)
            pool.give_back(lent)


def _result(check: Check, stage: Stage, *, everything: bool) -> Result:
    if reason := check.skipped(stage, everything=everything):
        return Result(check.group, check.name, "skipped", words=reason)
    began = time.monotonic()
    words = ""
    try:
        check.run(stage)
    except Nonconforming as error:
        words = str(error)
    except Exception as error:  # noqa: BLE001 - whatever a transport raises where nobody expected it
        words = f"{type(error).__name__}: {error}"
    return Result(check.group, check.name, "failed" if words else "ok", time.monotonic() - began, words)


def _summary(name: str, results: Sequence[Result]) -> str:
    count = {outcome: sum(one.outcome == outcome for one in results) for outcome in ("ok", "failed", "skipped")}
    verdict = "does not conform" if count["failed"] else "conforms"
    return f"{name} {verdict}: {count['ok']} ok, {count['failed']} failed, {count['skipped']} skipped"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weightwire check", description="Hold an installed transport against the conformance kit."
    )
    parser.add_argument("name", help="backend name, as `weightwire plugins` lists it")
    parser.add_argument("--all", action="store_true", help="run the expensive checks too")
    parser.add_argument("--group", action="append", choices=GROUPS, help="only this group; may be repeated")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a field of the trainer's init info, e.g. a directory; JSON, or else text; may be repeated",
    )
    parser.add_argument(
        "--buffer-bytes",
        type=int,
        default=TransportUnderTest.__dataclass_fields__["buffer_bytes"].default,
        help="what the transport's buffers hold in all; a tensor larger than that is sent (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    return parser


def _subject(options: argparse.Namespace) -> TransportUnderTest:
    """The transport that the command line names.

    Raises:
        PluginError: It cannot be had.
        ValueError: An option is malformed or missing.
    """
    given = dict(_option(text) for text in options.option)
    cls = engine_class("trainer", options.name).init_info_cls
    fields = [field for field in dataclasses.fields(cls) if field.init]
    missing = [
        field.name
        for field in fields
        if field.name not in given
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{cls.__name__} has to be told its {missing[0]}: pass --option {missing[0]}=VALUE")
    unknown = sorted(given.keys() - {field.name for field in fields})
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {unknown[0]!r}")
    cls(**given)
    return TransportUnderTest(options.name, options=given, buffer_bytes=options.buffer_bytes)


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--option takes KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
