"""`weightwire push`: a checkpoint into running workers, all of it or none."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

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
from weightwire_cli.reporting import reporting, runner


class PauseChoice(StrEnum):
    """How workers' readers are kept out."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class PolicyChoice(StrEnum):
    """How many servers have to commit."""

    ALL = "all"
    QUORUM = "quorum"
    BEST_EFFORT = "best-effort"


app = typer.Typer(add_completion=False)
main = runner(app, "push")


@app.command()
def push(
    path: PathArgument,
    to: ToOption,
    backend: Annotated[str, typer.Option(help="The transport that the bytes take.")] = "nccl",
    only: OnlyOption = None,
    label: Annotated[str | None, typer.Option(metavar="V", help="The workers' weight_version afterwards.")] = None,
    pause: Annotated[PauseChoice | None, typer.Option(help="Keep readers out around the update, so.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the bytes of every rank afterwards.")] = False,
    policy: Annotated[PolicyChoice, typer.Option(help="How many servers have to commit.")] = PolicyChoice.ALL,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be sent and what would not be taken; nothing moves.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="This machine's address for the workers; else the one on the way to them.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where a checkpoint's tensors are put to be sent; cuda where workers are on GPUs.")
    ] = "cpu",
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Take the workers from a trainer that is connected.")
    ] = False,
    timeout: TimeoutOption = 300.0,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JSONOption = False,
    debug: DebugOption = False,
) -> None:
    """Push a checkpoint into running workers: every rank of a server gets all of it, or none does.

    Exit status: 0 done, 1 failed (the workers are on their old weights) or --verify found a difference, 2 wrong call,
    3 done but the policy left servers out, 130 Ctrl-C (the update is aborted).
    """
    with reporting("push", debug=debug, as_json=as_json):
        # Torch takes seconds to import, and --help needs none of it.
        from weightwire_cli.pushing import Push, PushOptions, dry

        options = PushOptions(
            path=path,
            urls=tuple(to),
            backend=backend,
            only=tuple(only or ()),
            label=label,
            pause=pause.value if pause else None,
            verify=verify,
            policy=policy.value,
            address=address,
            device=device,
            takeover=takeover,
            timeout=timeout,
            token=token,
            token_file=token_file,
            as_json=as_json,
        )
        raise typer.Exit(dry(options) if dry_run else Push(options).run())
