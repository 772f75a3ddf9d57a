"""`weightwire verify`: what a checkpoint holds against what every rank of every worker holds."""

from __future__ import annotations

from dataclasses import asdict

import typer

from weightwire_cli.options import (
    DebugOption,
    JSONOption,
    OnlyOption,
    PathArgument,
    TimeoutOption,
    TokenFileOption,
    TokenOption,
    ToOption,
)
from weightwire_cli.reporting import FAILED, NOT_COMPARABLE, print_json, reporting, runner

app = typer.Typer(add_completion=False)
main = runner(app, "verify")


@app.command()
def verify(
    path: PathArgument,
    to: ToOption,
    only: OnlyOption = None,
    timeout: TimeoutOption = 300.0,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JSONOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare a checkpoint with what every rank of every worker holds, byte for byte, by parameter.

    Workers compute SHA-256 of what they serve; nothing moves and nothing changes. A rank that holds a piece, or another
    dtype, is said to be not comparable.

    Exit status: 0 all equal, 1 something differs, is missing or is extra, or a worker could not be asked, 2 wrong call,
    4 nothing differs but some could not be compared.
    """
    with reporting("verify", debug=debug, as_json=as_json):
        # Torch takes seconds to import, and --help needs none of it.
        from rich.console import Console

        from weightwire_cli.comparison import digests_of
        from weightwire_cli.selection import open_source
        from weightwire_cli.servers import connect
        from weightwire_cli.verifying import findings_of, show_findings

        servers = connect(to, token=token, token_file=token_file, timeout=timeout)
        source = open_source(path, only=only or ())
        findings = findings_of(servers, digests_of(source), partial=bool(only))
        if as_json:
            print_json({url: [asdict(one) for one in found] for url, found in findings.items()})
        else:
            show_findings(Console(), findings)
        kinds = {one.kind for found in findings.values() for one in found}
        raise typer.Exit(FAILED if kinds - {"not comparable"} else NOT_COMPARABLE if kinds else 0)
