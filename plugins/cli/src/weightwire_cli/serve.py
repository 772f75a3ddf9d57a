"""`weightwire serve`: a model behind the control routes, in one rank or in several."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from weightwire.errors import WeightwireError

TOKEN_VARIABLE = "WEIGHTWIRE_TOKEN"

app = typer.Typer(add_completion=False)


class Mistake(Exception):
    """Something the user gave cannot be used; told in one line."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: What follows `weightwire serve`.

    Returns:
        0 after Ctrl-C or SIGTERM; 130 where that came before it served; 1 where serving failed; 2 where the call is
        wrong.
    """
    command = typer.main.get_command(app)
    try:
        command.main(list(arguments), prog_name="weightwire serve")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0


@app.command()
def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY|FOLDER",
            help="A callable that returns an nn.Module or an object with load_weights; or a Hugging Face model folder.",
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine a token is needed.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, help="Ranks, each a process of its own.")] = 1,
    token: Annotated[
        str | None,
        typer.Option(help=f"Token that callers send. Others see it in the process list: prefer {TOKEN_VARIABLE}."),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File that holds the token.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    backend: Annotated[str | None, typer.Option(help="The transport to take; the trainer's, if none is given.")] = None,
    staging: Annotated[
        Literal["staged", "in_place"],
        typer.Option(help="in_place needs no second copy of the model and refuses readers during an update."),
    ] = "staged",
    commit: Annotated[Literal["swap", "copy"], typer.Option(help="copy keeps the addresses of parameters.")] = "swap",
    strict: Annotated[bool, typer.Option(help="Refuse unknown and missing names.")] = True,
    cast: Annotated[bool, typer.Option(help="Convert other dtypes instead of refusing them.")] = False,
    timeout: Annotated[float, typer.Option(min=0.001, help="Longest that a call may take, in seconds.")] = 300.0,
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Serve a model whose weights a trainer can replace while it runs.

    Prints one line with the URL once it is ready. Ctrl-C ends it in order. Under torchrun every process runs this
    command: rank 0 has the front, the others join it.
    """
    worker_options = {"backend": backend, "staging": staging, "commit": commit, "strict": strict, "cast": cast}
    try:
        interrupted = _watch_for_interrupts()

        def ready(url: str) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt
            print(f"weightwire: serving at {url}, Ctrl-C ends it", flush=True)

        server = _server()
        listening = server.Listening(
            ready=ready,
            host=host,
            port=port,
            token=read_token(token, token_file),
            server_options=_tls(tls_certificate, tls_key),
            route_options={"timeout": timeout},
        )
        command = _rank_command(target, worker_options, debug=debug)
        server.launch(
            lambda: load_model(target), listening, workers=workers, command=command, worker_options=worker_options
        )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (Mistake, WeightwireError, OSError, ValueError) as error:
        if debug:
            traceback.print_exc()
        rank = f", rank {os.environ['RANK']}" if "RANK" in os.environ else ""
        print(f"weightwire serve{rank}: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, Mistake) else 1) from None


def _watch_for_interrupts() -> threading.Event:
    """Have SIGINT and SIGTERM raise KeyboardInterrupt; the event remembers it, since an import may swallow that."""
    interrupted = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    return interrupted


def _server() -> Any:
    """What serves, of weightwire-server, which is a distribution of its own."""
    try:
        return importlib.import_module("weightwire_server.launching")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "weightwire_server":
            raise
        raise Mistake("serving comes with another distribution: pip install weightwire-server") from error


def read_token(token: str | None, file: Path | None) -> str | None:
    """The token as given, of a file, or of the environment; None if there is none.

    Raises:
        Mistake: It is empty, or given twice.
    """
    if token is not None and file is not None:
        raise Mistake("give --token or --token-file, not both")
    if file is not None:
        try:
            token = file.read_text().strip()
        except OSError as error:
            raise Mistake(f"--token-file {file} cannot be read: {error.strerror}") from error
    elif token is None:
        token = os.environ.get(TOKEN_VARIABLE)
    if token is not None and not token.strip():
        raise Mistake("the token is empty")
    return token


def _tls(certificate: Path | None, key: Path | None) -> dict[str, Any]:
    if certificate is None and key is None:
        return {}
    if certificate is None or key is None:
        raise Mistake("give both --tls-certificate and --tls-key")
    for file in (certificate, key):
        if not file.is_file():
            raise Mistake(f"{file} is no file")
    return {"ssl_certfile": certificate, "ssl_keyfile": key}


def _rank_command(target: str, options: dict[str, Any], *, debug: bool) -> list[str]:
    """This command again, as a rank runs it: what callers meet (address, token, TLS) is the front's alone."""
    command = [sys.executable, "-m", "weightwire_cli.serve", target]
    if options["backend"] is not None:
        command += ["--backend", options["backend"]]
    command += ["--staging", options["staging"], "--commit", options["commit"]]
    command += ["--strict" if options["strict"] else "--no-strict", "--cast" if options["cast"] else "--no-cast"]
    return [*command, "--debug"] if debug else command


def load_model(target: str) -> Any:
    """The model that a target stands for.

    Raises:
        Mistake: There is no such folder, module or factory, or it makes something else.
    """
    if Path(target).is_dir():
        return _pretrained(Path(target))
    module, colon, path = target.partition(":")
    if not colon or not module or not path:
        raise Mistake(f"{target!r} is neither a folder nor MODULE:FACTORY")
    made = _made(_attribute(module, path), target)
    from torch import nn

    if not isinstance(made, nn.Module) and not callable(getattr(made, "load_weights", None)):
        raise Mistake(
            f"{target} made a {type(made).__name__}: it has to be an nn.Module or an object with load_weights"
        )
    return made


def _attribute(module: str, path: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever somebody else's module raises
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise Mistake(f"there is no module {module!r} here or among the installed ones") from error
        raise Mistake(f"importing {module} raised {type(error).__name__}: {error}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise Mistake(f"module {module!r} has no {path!r}") from None
    return found


def _made(factory: Any, target: str) -> Any:
    from torch import nn

    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise Mistake(f"{target} is a {type(factory).__name__} and cannot be called")
    call: Callable[[], Any] = factory
    try:
        return call()
    except Exception as error:  # whatever somebody else's code raises
        raise Mistake(f"{target} raised {type(error).__name__}: {error}") from error


def _pretrained(folder: Path) -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise Mistake("a model folder needs another distribution: pip install 'weightwire-cli[huggingface]'") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        names = [name for name in config.architectures or () if hasattr(transformers, name)]
        model: Any = getattr(transformers, names[0]) if names else transformers.AutoModelForCausalLM
        return model.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().split("\n", 1)[0]
        raise Mistake(f"{folder} is no Hugging Face model folder: {first}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
