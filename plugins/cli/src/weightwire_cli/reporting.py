"""How commands talk: one line for an error, JSON for programs, and the exit statuses.

0    all good
1    it failed, or something differs
2    the call is wrong
3    done, but the policy left some servers out
4    nothing differs, but some of it could not be compared
130  Ctrl-C
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import typer

FAILED: Final = 1
LEFT_OUT: Final = 3
NOT_COMPARABLE: Final = 4
INTERRUPTED: Final = 130


def runner(app: typer.Typer, name: str) -> Callable[[Sequence[str]], int]:
    """The function that core's script calls for the command `name`: arguments to exit status."""

    def main(arguments: Sequence[str]) -> int:
        command = typer.main.get_command(app)
        try:
            result = command.main(list(arguments), prog_name=f"weightwire {name}", standalone_mode=True)
        except SystemExit as exit_:
            return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        return int(result or 0)

    return main


@contextmanager
def reporting(name: str, *, debug: bool, as_json: bool = False) -> Iterator[None]:
    """End the command with one line on standard error for whatever is raised inside.

    Args:
        name: The command's.
        debug: Print the traceback too.
        as_json: Print the error as JSON on standard output too.

    Raises:
        typer.Exit: With the exit status.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt as interrupt:
        words = str(interrupt) or "interrupted"
        raise _ended(name, words, INTERRUPTED, as_json=as_json, record={"type": "KeyboardInterrupt"}) from None
    except Exception as error:  # a person is told in one line, whatever it is
        if debug:
            traceback.print_exc()
        words = words_of(error)
        raise _ended(name, words, FAILED, as_json=as_json, record={"type": type(error).__name__}) from error


def _ended(name: str, words: str, status: int, *, as_json: bool, record: dict[str, Any]) -> typer.Exit:
    print(f"weightwire {name}: {words}", file=sys.stderr)
    if as_json:
        print_json({"error": {**record, "message": words}})
    return typer.Exit(status)


def words_of(error: BaseException) -> str:
    """An error in one line; errors that were not made for people say what they are."""
    from weightwire.errors import WeightwireError

    text = " ".join(str(error).split())
    return text if isinstance(error, WeightwireError) else f"{type(error).__name__}: {text}"


def print_json(record: Any) -> None:
    """Write a record to standard output."""
    print(json.dumps(record, indent=2))
