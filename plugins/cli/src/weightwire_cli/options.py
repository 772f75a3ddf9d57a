"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A .safetensors file, a checkpoint folder with its index, a Hugging Face folder, or module:factory.",
        show_default=False,
    ),
]
ToOption = Annotated[
    list[str], typer.Option("--to", metavar="URL", help="A worker server; may be repeated.", show_default=False)
]
OnlyOption = Annotated[
    list[str] | None, typer.Option("--only", metavar="GLOB", help="Only parameters named so; may be repeated.")
]
TokenOption = Annotated[
    str | None,
    typer.Option("--token", help="What the servers ask for. Others see it in the list of processes: better a file."),
]
TokenFileOption = Annotated[
    Path | None, typer.Option("--token-file", help="File that holds the token; else WEIGHTWIRE_TOKEN counts.")
]
TimeoutOption = Annotated[float, typer.Option(min=0.1, help="Seconds that the command may take.")]
JSONOption = Annotated[bool, typer.Option("--json", help="Write JSON to standard output, for programs.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
