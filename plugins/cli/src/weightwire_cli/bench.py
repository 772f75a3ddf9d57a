"""`weightwire bench`: a transport against the floor of this machine, in one run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from weightwire.discovery import Entry, entries
from weightwire.errors import TransportNotFound, WeightwireError
from weightwire.testing.measure import Case, Options, Report, Run, run_bench

GROUP = "weightwire.bench"
"""Entry-point group: transport -> module with `cases(options) -> list[Case]` (see `weightwire.testing.measure`),
or for a host `CASES`, their names, and `run(options, names, progress) -> Report`."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_UNITS = "KMGT"

app = typer.Typer(add_completion=False)


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: What follows `weightwire bench`.

    Returns:
        0; 1 where bytes differed or the benchmark failed; 2 where the call is wrong.
    """
    command = typer.main.get_command(app)
    try:
        command.main(list(arguments), prog_name="weightwire bench")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except WeightwireError as error:
        print(f"weightwire bench: {error}", file=sys.stderr)
        return 1
    return 0


def parse_size(text: str) -> int:
    """Bytes of `"1GiB"`, `"64MiB"`, `"10MB"`, `"4096"`.

    Raises:
        typer.BadParameter: It is no such size, or not positive.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 1GiB, 64MiB or 4096")
    number, unit = float(match[1]), match[2] or ""
    base = 1024 if unit[1:] else 1000
    nbytes = int(number * base ** (_UNITS.index(unit[0].upper()) + 1 if unit else 0))
    if nbytes < 1:
        raise typer.BadParameter("a size must be positive")
    return nbytes


@app.command()
def bench(
    file: Annotated[Path | None, typer.Argument(help="With --json: where to write; the output if none.")] = None,
    backend: Annotated[str, typer.Option(help="The transport to measure.")] = "nccl",
    size: Annotated[str, typer.Option(help="Size of the main payload.")] = "1GiB",
    tensors: Annotated[int, typer.Option(min=1, help="Number of its tensors.")] = 290,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of every way.")] = 5,
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be repeated.")] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, in processes of their own.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, into FILE if one is given.")] = False,
) -> None:
    """Measure a transport against memcpy, raw gloo and the naive ways.

    All ways of a case run on the same processes with the same payload, interleaved; after every round all bytes are
    compared. Ratios are speeds: `nccl.1to1.raw` is nccl's over that of one raw gloo operation.
    """
    if file is not None and not as_json:
        raise typer.BadParameter("a FILE is for --json")
    options = Options(nbytes=parse_size(size), tensors=tensors, rounds=rounds, memory=memory)
    with Console(stderr=True).status("starting") as status:
        report = _measured(backend, options, case, status.update)
    text = json.dumps(report.to_json(), indent=2)
    if file is not None:
        file.write_text(text + "\n")
    if as_json and file is None:
        print(text)
    else:
        _show(report)
    raise typer.Exit(0 if report.bit_equal else 1)


def _measured(backend: str, options: Options, names: Sequence[str] | None, progress: Callable[[str], None]) -> Report:
    module = _module(backend)
    if not hasattr(module, "run"):
        return run_bench(backend, _chosen(module.cases(options), names), options, progress=progress)
    # A host, whose ends are no ranks that could all do everything.
    _check(names, list(module.CASES))
    report: Report = module.run(options, names, progress)
    return report


def _module(backend: str) -> Any:
    found = {entry.name: entry for entry in entries(GROUP)}
    entry: Entry | None = found.get(backend)
    if entry is None:
        have = ", ".join(sorted(found)) or "none"
        raise TransportNotFound(f"no installed distribution has a benchmark for {backend!r}; there are: {have}")
    return entry.load()


def _chosen(cases: Sequence[Case], names: Sequence[str] | None) -> list[Case]:
    _check(names, [case.name for case in cases])
    return [case for case in cases if not names or case.name in names]


def _check(names: Sequence[str] | None, known: Sequence[str]) -> None:
    if unknown := sorted(set(names or ()) - set(known)):
        raise typer.BadParameter(f"no case {', '.join(unknown)}; there are: {', '.join(known)}", param_hint="--case")


def _show(report: Report) -> None:
    console = Console()
    for name, payload in report.payload.items():
        title = f"{name}: {payload['name']}, {_size(payload['bytes'])}"
        table = Table("way", title=title, title_justify="left")
        for heading in ("median", "worst", "GiB/s", "peak memory, sender", "receiver", "equal"):
            table.add_column(heading, justify="right")
        for run in report.runs:
            if run.case == name:
                table.add_row(*_row(run))
        console.print(table)
    ratios = Table("ratio", title="speed over the reference's", title_justify="left")
    ratios.add_column("", justify="right")
    for name, value in report.ratios.items():
        ratios.add_row(name, f"{value:.3g}")
    console.print(ratios)
    for run in report.runs:
        for key, value in run.extras.items():
            shown = f"{value:.6g}" if isinstance(value, float) else value
            console.print(f"{run.case} {run.name} {key}: {shown}")
    if not report.bit_equal:
        console.print("[bold red]bytes differed: see the column `equal`[/]")


def _row(run: Run) -> list[str]:
    peaks = [_size(memory["peak"] - memory["idle"]) for memory in run.peak_memory.values()]
    return [
        run.name,
        f"{run.median * 1e3:.1f} ms",
        f"{max(run.seconds) * 1e3:.1f} ms",
        f"{run.gib_per_second:.2f}",
        peaks[0] if peaks else "-",
        max(peaks[1:], default="-") if peaks else "-",
        "yes" if run.bit_equal else "NO",
    ]


def _size(nbytes: int) -> str:
    power = min(3, max(0, (abs(nbytes).bit_length() - 1) // 10))
    return f"{nbytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
