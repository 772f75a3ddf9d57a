"""What a push did, and what one would do, as tables and as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightwire.layout import ParamMeta
from weightwire.report import RankReport, ServerOutcome, TransferReport
from weightwire_cli.comparison import Finding
from weightwire_cli.dry_run import Plan
from weightwire_cli.shown import shown_bytes, shown_change, shown_revision, shown_seconds
from weightwire_cli.verifying import show_findings

_PHASES = ("receive", "prepare", "gate", "vote", "commit")
_SHOWN = 20

Infos = Mapping[str, Mapping[str, Any]]
Findings = Mapping[str, Sequence[Finding]]


def push_record(report: TransferReport, before: Infos, after: Infos, findings: Findings | None) -> dict[str, Any]:
    """The outcome of a push as JSON types."""
    record = report.to_json()
    for server in record["servers"]:
        url = server["server"]
        server |= {"before": before[url], "after": after[url], "committed": server["error"] is None}
        if findings is not None and url in findings:
            server["differences"] = [asdict(one) for one in findings[url]]
    return record


def show_push(console: Console, report: TransferReport, before: Infos, after: Infos, findings: Findings | None) -> None:
    """Write the outcome of a push for people."""
    amount = f"{report.parameters} parameters, {shown_bytes(report.bytes)}"
    speed = f"{shown_seconds(report.total_seconds)}, {report.gib_per_second:.2f} GiB/s"
    console.print(f"{amount}, {report.scope} update, {speed} ({escape(report.path)})", highlight=False)
    for outcome in report.servers:
        console.print(_table(outcome, report.ranks, before[outcome.server], after[outcome.server]))
    if findings is not None:
        show_findings(console, findings)


def _table(
    outcome: ServerOutcome, ranks: Sequence[RankReport], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Table:
    style = "red" if outcome.error is not None else "bold"
    table = Table(title=f"[{style}]{escape(outcome.server)}[/]", title_justify="left", show_header=False, box=None)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    if outcome.error is not None:
        table.add_row("left out", escape(outcome.error))
    label = shown_change(str(before.get("weight_version", "-")), str(after.get("weight_version", "-")))
    table.add_row("label", escape(label))
    table.add_row(
        "revision", shown_change(shown_revision(before.get("revision")), shown_revision(after.get("revision")))
    )
    mine = [rank for rank in ranks if _worker_rank(rank) in outcome.workers]
    if mine:
        slowest = {phase: max(rank.seconds.get(phase, 0.0) for rank in mine) for phase in _PHASES}
        table.add_row("bytes", shown_bytes(sum(rank.bytes for rank in mine)))
        table.add_row("seconds", ", ".join(f"{phase} {shown_seconds(took)}" for phase, took in slowest.items()))
    return table


def _worker_rank(rank: RankReport) -> int | None:
    found = re.match(r"worker rank (\d+)", rank.rank)
    return int(found[1]) if found else None


def show_plan(console: Console, plan: Plan, metadata: Sequence[ParamMeta], *, partial: bool) -> None:
    """Write what a push would do to one server for people."""
    info = plan.info
    label, revision = escape(str(info.get("weight_version", "-"))), shown_revision(info.get("revision"))
    console.print(f"[bold]{escape(plan.server)}[/]  {info.get('state', '-')}, label {label}, {revision}")
    amount = f"{len(metadata)} parameters, {shown_bytes(sum(meta.nbytes for meta in metadata))}"
    console.print(f"would be sent: {amount}, a {'partial' if partial else 'full'} update", highlight=False)
    if not plan.details:
        console.print("only names were compared: this server tells no dtypes and shapes", highlight=False)
    lines = [f"[red]not taken[/]  {escape(one.name)}: {escape(_why(one.why, one.nearest))}" for one in plan.refused]
    buffers = "" if plan.details else " (unless it is a buffer)"
    lines += [f"[red]lacking[/]    {escape(name)}: a full update has to bring it{buffers}" for name in plan.lacking]
    for line in lines[:_SHOWN]:
        console.print(line, highlight=False)
    if len(lines) > _SHOWN:
        console.print(f"and {len(lines) - _SHOWN} more; --json lists all", highlight=False)
    if plan.fits:
        console.print("[green]would be taken[/]; nothing was moved")
    else:
        console.print(f"[red]would be refused[/]: {plan.taken} of {len(metadata)} would fit; nothing was moved")


def _why(why: str, nearest: Sequence[str]) -> str:
    return f"{why}; nearest: {', '.join(nearest)}" if nearest else why
