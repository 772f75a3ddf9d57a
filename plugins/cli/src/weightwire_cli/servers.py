"""The worker servers that a command talks to, and what they say of themselves."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import typer

from weightwire.clients.http import HTTPVLLMWeightSyncClient
from weightwire.clients.parallel import ParallelCalls
from weightwire.errors import DeadlineExceeded, MessageError, PeerFailed, WeightwireError

TOKEN_VARIABLE: Final = "WEIGHTWIRE_TOKEN"
T = TypeVar("T")


class Server(HTTPVLLMWeightSyncClient):
    """One worker server, with what commands ask beyond a trainer's calls."""

    def parameters(self) -> dict[str, dict[str, Stored]] | None:
        """What each rank can take, by place (`"dp0:pp0:pcp0:tp0"`) and name; None if the server does not tell.

        Raises:
            PeerFailed: The answer is not of that form.
        """
        told = self._get("weight_info", {"parameters": "true"}).get("parameters")
        if told is None:
            return None
        try:
            return {
                place: {name: Stored.from_json(record) for name, record in records.items()}
                for place, records in told.items()
            }
        except (AttributeError, KeyError, TypeError) as error:
            raise PeerFailed(f"{self.base_url}/weight_info answered parameters of another form: {error}") from error

    def checksums(self) -> dict[str, dict[str, str]]:
        """SHA-256 in hex of what each rank holds, by place and name.

        Raises:
            PeerFailed: The answer is not of that form.
        """
        return by_place(self.weight_checker("checksum").get("checksums"), self.base_url)


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter of a worker rank.

    Attributes:
        dtype: Name of its dtype.
        shape: The shape that an update has to bring.
        local_shape: The shape of what this rank holds of it.
        names: All its names: several where it is tied.
        buffer: Whether it is a buffer, which an update may leave out.
    """

    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    buffer: bool = False

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Stored:
        """Read what a server answers."""
        shape = tuple(map(int, record["shape"]))
        local = tuple(map(int, record.get("local_shape", shape)))
        names = tuple(record.get("names", ()))
        return cls(str(record["dtype"]), shape, local, names, bool(record.get("buffer", False)))


def by_place(checksums: Any, where: str) -> dict[str, dict[str, str]]:
    """Split `dp0:pp0:pcp0:tp0:<name>` into place and name; a name may hold colons itself.

    Raises:
        PeerFailed: A key is not of that form.
    """
    found: dict[str, dict[str, str]] = {}
    if not isinstance(checksums, dict):
        raise PeerFailed(f"{where}/weight_checker answered no checksums")
    for key, value in checksums.items():
        parts = key.split(":", 4)
        if len(parts) < 5:
            raise PeerFailed(f"{where}/weight_checker answered a key {key!r}, which is no dp:pp:pcp:tp:name")
        found.setdefault(":".join(parts[:4]), {})[parts[4]] = str(value)
    return found


def connect(urls: Sequence[str], *, token: str | None, token_file: Path | None, timeout: float) -> list[Server]:
    """Clients of the servers at `urls`; nothing is sent yet.

    Raises:
        typer.BadParameter: No URL, one twice, or a token file that cannot be read or holds none.
    """
    cleaned = [url.rstrip("/") for url in urls]
    for url in cleaned:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise typer.BadParameter(f"{url!r} is no URL such as http://127.0.0.1:8000")
    if twice := next((url for url in cleaned if cleaned.count(url) > 1), None):
        raise typer.BadParameter(f"{twice} is given twice")
    secret = _token(token, token_file)
    return [Server(url, timeout, token=secret) for url in cleaned]


def _token(token: str | None, file: Path | None) -> str | None:
    if token is not None and file is not None:
        raise typer.BadParameter("give --token or --token-file, not both")
    if file is not None:
        try:
            token = file.read_text().strip()
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"the token file {file} cannot be read: {error}") from error
    elif token is None:
        token = os.environ.get(TOKEN_VARIABLE)
    if token is not None and not token.strip():
        raise typer.BadParameter("the token is empty")
    if token is not None and not (token.isascii() and token.isprintable()):
        raise typer.BadParameter("the token has characters that a header cannot carry")
    return token


def ask_all(
    servers: Sequence[Server], question: Callable[[Server], T], *, seconds: float | None = None
) -> list[T | WeightwireError]:
    """Ask all servers at once; in their order the answers, or the error of one that gave none.

    Args:
        servers: Whom to ask.
        question: What to ask each.
        seconds: Time that they have; None leaves it to the timeout of the question.
    """
    # Not a thread pool: its threads would hold up Ctrl-C until the last server has answered.
    calls = ParallelCalls(servers, range(len(servers)), lambda client, at: question(servers[at]))
    answers, errors = calls.wait(threading.TIMEOUT_MAX if seconds is None else seconds)
    found: list[T | WeightwireError] = []
    for at, server in enumerate(servers):
        late = DeadlineExceeded(f"it did not answer within {seconds} s", rank=server.base_url)
        error = errors.get(at, late)  # counts only where there is no answer
        if not isinstance(error, WeightwireError):
            raise error
        found.append(answers.get(at, error))
    return found


def demand(answers: Sequence[T | WeightwireError]) -> list[T]:
    """The answers, if all servers gave one.

    Raises:
        WeightwireError: The first server that did not.
    """
    for answer in answers:
        if isinstance(answer, WeightwireError):
            raise answer
    return [answer for answer in answers if not isinstance(answer, WeightwireError)]


def own_address(server: str) -> str:
    """This machine's address on the way to a server: what its workers can connect to.

    Raises:
        MessageError: The server's name cannot be resolved.
    """
    parts = urlsplit(server)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: it only chooses the way
            return str(probe.getsockname()[0])
    except OSError as error:
        raise MessageError(f"{server} cannot be resolved: {error}") from error
