"""A server on a socket of its own, bound before anything starts, so that port 0 works and the port is known."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import uvicorn
from starlette.types import ASGIApp

from weightwire.deadline import Deadline
from weightwire_server.access import require_token_beyond_loopback
from weightwire_server.app import create_app
from weightwire_server.patience import PatientProtocol

if TYPE_CHECKING:
    from weightwire.worker import Worker

_KEEP_ALIVE_SECONDS = 75
_LAST_ANSWERS_SECONDS = 5
_START_SECONDS = 30.0


class BoundServer:
    """Serves any ASGI app with uvicorn: `run()` blocks, a `with` statement serves in a thread.

    Args:
        app: The app.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        sock: A listening socket instead of both; a Unix socket has no port and no URL.
        **options: More of `uvicorn.Config`, e.g. `ssl_certfile`.

    Raises:
        OSError: The address cannot be had.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        sock: socket.socket | None = None,
        **options: Any,
    ) -> None:
        # Clients keep connections for a minute: a server that closed them earlier would race with their next call.
        defaults: dict[str, Any] = {
            "access_log": False,
            "http": PatientProtocol,
            "log_level": "warning",
            "proxy_headers": False,
            "timeout_graceful_shutdown": _LAST_ANSWERS_SECONDS,
            "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
            "ws": "none",
        }
        config = uvicorn.Config(app, **(defaults | options))
        self._server = uvicorn.Server(config)
        self._socket = sock or _listening(host, port, config.backlog)
        inet = self._socket.family != socket.AF_UNIX
        self.port: int = self._socket.getsockname()[1] if inet else 0
        """Port that the server listens on."""
        name = f"[{host}]" if ":" in host else host or "0.0.0.0"
        self.url = f"{'https' if config.is_ssl else 'http'}://{name}:{self.port}" if inet else ""
        """Where the server is."""
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM comes, or `stop` is called from another thread."""
        with suppress(KeyboardInterrupt), self._socket:
            self._server.run(sockets=[self._socket])

    def start(self) -> None:
        """Serve in a daemon thread; returns once requests are answered.

        Raises:
            RuntimeError: The app did not start.
        """
        self._thread = threading.Thread(target=self.run, name="weightwire-server", daemon=True)
        self._thread.start()
        deadline = Deadline(_START_SECONDS, what="the server to start")
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the app did not start; its log says why")
            deadline.sleep(0.005)

    def end(self) -> None:
        """Have `run` return, from any thread."""
        self._server.should_exit = True

    def stop(self) -> None:
        """End the serving; calls that run get 5 s for their answers, then they are cancelled. Idempotent."""
        self.end()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._socket.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _listening(host: str, port: int, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=backlog)
    # Made again from its descriptor it knows that it speaks TCP; asyncio turns Nagle's delay (40 ms) off only then.
    return socket.socket(fileno=listener.detach())


def serve(
    worker: Worker,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    ready: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Serve a worker's control routes until SIGINT or SIGTERM comes, then leave its trainer.

    Args:
        worker: The worker.
        host: Address to listen on; one that other machines reach needs a token.
        port: Port to listen on; 0 takes a free one.
        token: Bearer token that callers have to send.
        ready: Called with the server's URL once connections are taken; without it a line on standard error tells.
        **options: As for `control_routes`.

    Raises:
        Unauthorized: `host` reaches beyond loopback and there is no token.
        OSError: The address cannot be had.
    """
    require_token_beyond_loopback(host, token)
    server = BoundServer(create_app(worker, token=token, **options), host=host, port=port)
    (ready or tell)(server.url)
    server.run()


def tell(url: str) -> None:
    """Say on standard error where the server is."""
    sys.stderr.write(f"weightwire: serving at {url}, Ctrl-C ends it\n")
