"""The `weightwire` script: what is installed, what is wrong with it, and sub-commands of other distributions.

A distribution adds a sub-command with an entry point of the group `weightwire.commands`, whose value is
`module:function` and whose function takes the arguments after the command's name and returns the exit status.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import platform
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final

import importlib_metadata

from weightwire import API_VERSION, __version__
from weightwire.discovery import FIRST_PARTY, Entry, Transport, candidates, entries, transports
from weightwire.hookspecs import TransportSpec
from weightwire.loading import strict, survey

GROUP: Final = "weightwire.commands"

COMMANDS: Final[Mapping[str, str]] = {
    "bench": "weightwire-cli",
    "completion": "weightwire-cli",
    "plan": "weightwire-m2n",
    "push": "weightwire-cli",
    "serve": "weightwire-cli",
    "status": "weightwire-cli",
    "verify": "weightwire-cli",
}
"""weightwire's own sub-commands and the distributions they come in, whether installed or not."""

_FAILED: Final = ("broken", "conflict", "incompatible")
_VARIABLES: Final = ("WEIGHTWIRE_PLUGINS", "WEIGHTWIRE_DISABLE", "WEIGHTWIRE_STRICT")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script.

    Args:
        arguments: What follows its name; `sys.argv[1:]` if None.

    Returns:
        0, 1 where something is wrong with what is installed, 2 where the call is.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["check"]:
        return _check(given[1:])
    if given and not given[0].startswith("-") and given[0] not in ("plugins", "doctor"):
        return _external(given[0], given[1:])
    options = _parser().parse_args(given)
    if options.command == "plugins":
        return _plugins(as_json=options.json)
    return _doctor(options.name)


def _parser() -> argparse.ArgumentParser:
    added = sorted({entry.name for entry in entries(GROUP) if not entry.disabled})
    missing = sorted(set(COMMANDS) - set(added))
    parser = argparse.ArgumentParser(
        prog="weightwire",
        description="Moves the weights of a model being trained into the processes serving it.",
        epilog=f"Also installed: {', '.join(added) or '-'}. Not installed: {', '.join(missing) or '-'}.",
    )
    parser.add_argument("--version", action="version", version=f"weightwire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    plugins = commands.add_parser("plugins", help="list the installed transports and their state")
    plugins.add_argument("--json", action="store_true", help="as JSON, for programs")
    doctor = commands.add_parser("doctor", help="say what is wrong with what is installed, at length")
    doctor.add_argument("name", nargs="?", help="one transport only")
    commands.add_parser("check", help="hold a transport against the conformance kit", add_help=False)
    return parser


def _check(arguments: list[str]) -> int:
    # Here and not above: the kit imports torch, and the other commands do without.
    from weightwire.testing.conformance.command import main as check

    return check(arguments)


def _plugins(*, as_json: bool) -> int:
    found = survey()
    if as_json:
        transports = [_described(transport, spec) for transport, spec in found]
        print(json.dumps({"weightwire": __version__, "api": API_VERSION, "transports": transports}, indent=2))
    elif found:
        rows = [("TRANSPORT", "DISTRIBUTION", "VERSION", "STATE")]
        rows += [(_titled(one), one.distribution, one.version, one.state) for one, _ in found]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row, (transport, _) in zip(rows, [(None, None), *found], strict=True):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
            if transport is not None and transport.reason:
                print(_explained(transport))
    else:
        print("No transport is installed. The first one to have: pip install weightwire-nccl")
    return 1 if strict() and any(transport.state in _FAILED for transport, _ in found) else 0


def _titled(transport: Transport) -> str:
    aliases = f" ({', '.join(transport.aliases)})" if transport.aliases else ""
    return f"{transport.name}{aliases}"


def _explained(transport: Transport) -> str:
    remedy = f"; to mend it: {transport.remedy}" if transport.remedy else ""
    return textwrap.indent(transport.reason + remedy, "    ")


def _described(transport: Transport, spec: TransportSpec | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": transport.name,
        "aliases": list(transport.aliases),
        "distribution": transport.distribution,
        "version": transport.version,
        "value": transport.entry.value,
        "state": transport.state,
        "reason": transport.reason,
        "remedy": transport.remedy,
    }
    if spec is not None:
        record |= {
            "api": spec.api_version,
            "wire": spec.wire_version,
            "capabilities": sorted(spec.capabilities),
        }
    return record


def _doctor(name: str | None) -> int:
    wanted = {one.entry for one in (candidates(name) if name else transports())}
    if name and not wanted:
        way = f": pip install {FIRST_PARTY[name]}" if name in FIRST_PARTY else ""
        print(f"No transport {name!r} is installed{way}", file=sys.stderr)
        return 1
    found = [transport for transport, _ in survey() if transport.entry in wanted]
    print(f"weightwire {__version__}, API {'.'.join(map(str, API_VERSION))}, Python {platform.python_version()}")
    print(_torch())
    for variable in _VARIABLES:
        if variable in os.environ:
            print(f"{variable}={os.environ[variable]}")
    for transport in found:
        print(f"\n{_titled(transport)}, {transport.distribution} {transport.version}: {transport.state}")
        if transport.reason:
            print(_explained(transport))
        if transport.cause is not None:
            print(textwrap.indent("".join(traceback.format_exception(transport.cause)), "    "))
    if not found:
        print("\nNo transport is installed. The first one to have: pip install weightwire-nccl")
    healthy = ("ready", "disabled") if name is None else ("ready",)
    return 0 if found and all(transport.state in healthy for transport in found) else 1


def _torch() -> str:
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - torch reads others' metadata, and stumbles over what is damaged there
        return f"torch cannot be imported: {type(error).__name__}: {error}"
    return f"torch {torch.__version__}, CUDA devices: {torch.cuda.device_count()}"


def _external(name: str, arguments: list[str]) -> int:
    found = [entry for entry in entries(GROUP) if entry.name == name]
    usable = [entry for entry in found if not entry.disabled]
    if len(usable) == 1:
        return _run(usable[0], arguments)
    if usable:
        places = " and ".join(f"{entry.distribution} ({entry.value})" for entry in usable)
        words = f"{name!r} is declared by {places}; list the distributions you want in WEIGHTWIRE_PLUGINS"
    elif found:
        words = f"{name!r} of {found[0].distribution} is switched off: {found[0].disabled}"
    else:
        words = _missing(name)
    print(f"weightwire: {words}", file=sys.stderr)
    return 2


def _missing(name: str) -> str:
    if name not in COMMANDS:
        known = {"plugins", "doctor", "check", *COMMANDS, *(entry.name for entry in entries(GROUP))}
        close = difflib.get_close_matches(name, known, n=1)
        return f"there is no command {name!r}" + (
            f"; did you mean {close[0]!r}?" if close else "; see weightwire --help"
        )
    distribution = COMMANDS[name]
    try:
        version = importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return f"{name!r} comes with another distribution: pip install {distribution}"
    return f"{name!r} is not in {distribution} {version}: pip install --upgrade {distribution}"


def _run(entry: Entry, arguments: list[str]) -> int:
    try:
        command = entry.load()
    except Exception as error:  # noqa: BLE001 - whatever somebody else's module raises
        traceback.print_exc()
        print(
            f"weightwire: {entry.name!r} of {entry.distribution} {entry.version} cannot be loaded: "
            f"{type(error).__name__}: {error}",
            file=sys.stderr,
        )
        return 1
    return int(command(arguments) or 0)
