"""Asking servers what they hold, and comparing it with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightwire_cli.comparison import Digest, Finding, compare
from weightwire_cli.servers import Server, ask_all, demand

_SHOWN = 50


def findings_of(servers: Sequence[Server], digests: Mapping[str, Digest], *, partial: bool) -> dict[str, list[Finding]]:
    """What is not the same in the checkpoint and in each server, by URL.

    Raises:
        WeightwireError: A server does not answer, or its weights are torn.
    """

    def ask(server: Server) -> list[Finding]:
        return compare(digests, server.checksums(), server.parameters(), partial=partial)

    if not servers:
        return {}
    return {server.base_url: found for server, found in zip(servers, demand(ask_all(servers, ask)), strict=True)}


def show_findings(console: Console, findings: Mapping[str, Sequence[Finding]]) -> None:
    """Write what differs as a table, the first fifty of each server."""
    for server, found in findings.items():
        if not found:
            console.print(f"[green]equal[/]  {escape(server)}")
            continue
        table = Table("rank", "parameter", "", "", title=escape(server), title_justify="left")
        for one in found[:_SHOWN]:
            style = "yellow" if one.kind == "not comparable" else "red"
            table.add_row(one.place, escape(one.name), f"[{style}]{one.kind}[/]", escape(one.why))
        console.print(table)
        if len(found) > _SHOWN:
            console.print(f"and {len(found) - _SHOWN} more; --json lists all")
