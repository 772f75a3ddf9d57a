"""`weightwire status`: what worker servers are doing, once or live."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from weightwire.errors import WeightwireError
from weightwire_cli.options import DebugOption, JSONOption, TokenFileOption, TokenOption
from weightwire_cli.reporting import FAILED, print_json, reporting, runner
from weightwire_cli.servers import Server, ask_all, connect
from weightwire_cli.shown import shown_bytes, shown_revision, shown_seconds

_STYLES = {"ready": "green", "uninitialised": "cyan", "updating": "yellow"}

app = typer.Typer(add_completion=False)
main = runner(app, "status")
Infos = Mapping[str, Mapping[str, Any]]


@app.command()
def status(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Worker servers.", show_default=False)],
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a server has to answer.")] = 5.0,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JSONOption = False,
    debug: DebugOption = False,
) -> None:
    """Show workers, their states, labels, revisions and last transfers.

    With --json and --watch, one record a line. Exit status: 0 all answer and serve whole weights, 1 one does not, 2
    wrong call, 130 Ctrl-C of --watch.
    """
    with reporting("status", debug=debug, as_json=as_json and not watch):
        servers = connect(urls, token=token, token_file=token_file, timeout=timeout)
        if watch:
            _watch(servers, interval, timeout, as_json=as_json)
        infos = look(servers, timeout)
        if as_json:
            print_json(infos)
        else:
            Console().print(_table(infos))
        raise typer.Exit(0 if all(map(_is_well, infos.values())) else FAILED)


def look(servers: Sequence[Server], seconds: float) -> dict[str, dict[str, Any]]:
    """What each server says of itself, by URL; of one that does not answer, `state` unreachable and `error`."""
    answers = ask_all(servers, lambda server: server.weight_info(), seconds=seconds)
    return {
        server.base_url: {"state": "unreachable", "error": answer.message}
        if isinstance(answer, WeightwireError)
        else answer
        for server, answer in zip(servers, answers, strict=True)
    }


def _is_well(info: Mapping[str, Any]) -> bool:
    return info.get("state") not in ("unreachable", "torn") and info.get("weights", "whole") == "whole"


def _watch(servers: Sequence[Server], interval: float, timeout: float, *, as_json: bool) -> None:
    if as_json:
        while True:
            print(json.dumps(look(servers, timeout)), flush=True)
            time.sleep(interval)
    with Live(_table(look(servers, timeout)), console=Console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(_table(look(servers, timeout)), refresh=True)


def _table(infos: Infos) -> Group:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("server", no_wrap=True)
    table.add_column("ranks", justify="right")
    table.add_column("state", no_wrap=True)
    table.add_column("label", overflow="fold")
    table.add_column("revision", no_wrap=True)
    table.add_column("last transfer")
    errors = []
    for url, info in infos.items():
        state = str(info.get("state", "-"))
        shown = f"[{_STYLES.get(state, 'red')}]{state}[/]"
        if str(info.get("gate", "open")) != "open":
            shown += f", {info['gate']}"
        table.add_row(
            escape(url),
            str(info.get("world_size", "-")),
            shown,
            escape(str(info.get("weight_version", "-"))),
            shown_revision(info.get("revision")),
            _last(info.get("last_transfer")),
        )
        if "error" in info:
            errors.append(Text(str(info["error"]), style="red"))
    return Group(table, *errors)


def _last(transfer: Any) -> str:
    """What a server tells of its last update: bytes, seconds, and when (Unix time) it ended."""
    if not isinstance(transfer, Mapping) or "bytes" not in transfer:
        return "-"
    words = shown_bytes(int(transfer["bytes"]))
    if isinstance(transfer.get("seconds"), int | float):
        words += f" in {shown_seconds(transfer['seconds'])}"
    if isinstance(transfer.get("at"), int | float):
        words += f", {max(0, time.time() - transfer['at']):.0f} s ago"
    return words
