"""`weightwire completion`: what a shell needs to complete `weightwire` and its commands.

    eval "$(weightwire completion bash)"        # in ~/.bashrc; zsh and fish likewise

A command takes part if its module has a `typer.Typer` called `app`.
"""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from weightwire.command import GROUP
from weightwire.discovery import entries
from weightwire_cli.reporting import runner

_OWN: Final = ("doctor", "plugins")
_SCRIPTS: Final = {
    "bash": """\
_weightwire_completion() {
    local IFS=$'\\n'
    COMPREPLY=($(weightwire completion bash -- "${COMP_WORDS[@]:1:COMP_CWORD}"))
}
complete -o default -F _weightwire_completion weightwire
""",
    "zsh": """\
#compdef weightwire
_weightwire_completion() {
    local -a found
    found=("${(@f)$(weightwire completion zsh -- "${(@)words[2,CURRENT]}")}")
    [[ -n "$found" ]] && compadd -- $found || _files
}
compdef _weightwire_completion weightwire
""",
    "fish": """\
function _weightwire_completion
    set -l words (commandline -opc) (commandline -ct)
    weightwire completion fish -- $words[2..]
end
complete -c weightwire -a '(_weightwire_completion)'
""",
}


class Shell(StrEnum):
    """Shells that are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


app = typer.Typer(add_completion=False)
main = runner(app, "completion")


@app.command()
def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell.", show_default=False)],
    words: Annotated[
        list[str] | None, typer.Argument(hidden=True, help="What was typed after `weightwire`, the last word begun.")
    ] = None,
) -> None:
    """Print what a shell has to run so that it completes weightwire.

    In ~/.bashrc: eval "$(weightwire completion bash)". In ~/.zshrc likewise, after compinit. In fish:
    weightwire completion fish > ~/.config/fish/completions/weightwire.fish
    """
    if words is None:
        print(_SCRIPTS[shell.value], end="")
        return
    print("\n".join(candidates(words)))


def candidates(words: list[str]) -> list[str]:
    """What the last of `words` can become.

    Args:
        words: What was typed after `weightwire`; the last may be empty.
    """
    *before, begun = words or [""]
    found = {entry.name: entry for entry in entries(GROUP) if not entry.disabled}
    if not before:
        return sorted(name for name in {*_OWN, *found} if name.startswith(begun))
    entry = found.get(before[0])
    if entry is None:
        return []
    module = importlib.import_module(entry.value.partition(":")[0])
    command = getattr(module, "app", None)
    if not isinstance(command, typer.Typer):
        return []
    return _of_command(typer.main.get_command(command), before[1:], begun)


def _of_command(command: Any, before: list[str], begun: str) -> list[str]:
    """Names of options, or the values of the option before; paths are left to the shell."""
    context = command.make_context(command.name, list(before), resilient_parsing=True)
    last = before[-1] if before else ""
    takes = [one for one in command.params if last in one.opts and not getattr(one, "is_flag", False)]
    items = takes[0].shell_complete(context, begun) if takes else command.shell_complete(context, begun)
    return [item.value for item in items if item.type == "plain"]
