"""One rank of several: its worker behind the very same control routes, on a socket that only its front knows."""

from __future__ import annotations

from socket import AF_UNIX, socket
from typing import TYPE_CHECKING

from weightwire_server.app import create_app
from weightwire_server.lifeline import Lifeline, RankGate
from weightwire_server.serving import BoundServer

if TYPE_CHECKING:
    from weightwire.worker import Worker


class RankServer:
    """Serves a worker to the front that `lifeline` leads to.

    Args:
        lifeline: The way to the front.
        worker: The worker; its readers are the front's from now on.
    """

    def __init__(self, lifeline: Lifeline, worker: Worker) -> None:
        worker.gate = RankGate(lifeline, lambda: worker.session.update)
        self._lifeline = lifeline
        path = lifeline.directory.rank(lifeline.rank)
        path.unlink(missing_ok=True)  # of a rank that was here before
        listener = socket(AF_UNIX)
        listener.bind(str(path))
        listener.listen(128)
        self._server = BoundServer(create_app(worker, token=lifeline.directory.secret()), sock=listener)

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM comes, or the front is gone."""
        self._lifeline.tell(ready=True)
        self._server.run()
        self._lifeline.close()
