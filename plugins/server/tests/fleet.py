"""A front and its ranks in this process: real sockets, and for each test new workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from socket import AF_UNIX, socket
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from plugins.server.tests.scene import Scene, small_model, until
from weightwire.deadline import Deadline
from weightwire.messages import ParallelConfig
from weightwire.worker import Worker
from weightwire_server import BoundServer, create_app
from weightwire_server.front import Front
from weightwire_server.lifeline import Lifeline, RankGate
from weightwire_server.private_directory import PrivateDirectory

RANKS = 2


class Switch:
    """One server for all tests, which takes a second to start and stop; each test puts its app in."""

    app: ASGIApp
    loop: asyncio.AbstractEventLoop
    active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self.loop = asyncio.get_running_loop()
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        # What tests ask in between does not count: its answer arrives before it is over here.
        counted = scope.get("path") != "/weight_info"
        self.active += counted
        try:
            await self.app(scope, receive, send)
        finally:
            self.active -= counted


@contextmanager
def rank_servers(directory: PrivateDirectory) -> Iterator[list[Switch]]:
    """The ranks' servers, on the sockets on which a front calls them."""
    switches, servers = [], []
    for rank in range(RANKS):
        listener = socket(AF_UNIX)
        listener.bind(str(directory.rank(rank)))
        listener.listen(128)
        switches.append(Switch())
        servers.append(BoundServer(switches[-1], sock=listener))
        servers[-1].start()
    try:
        yield switches
    finally:
        for server in servers:
            server.end()
        for server in servers:
            server.stop()


class FleetScene(Scene):
    """A front with two ranks with backend `held`.

    Args:
        url: Where the front is served.
        switch: Takes its app.
        directory: Where it meets its ranks.
        ranks: Take theirs.
    """

    def __init__(self, url: str, switch: Switch, directory: PrivateDirectory, ranks: Sequence[Switch]) -> None:
        self._switch, self._directory, self._ranks = switch, directory, ranks
        self._lifelines: dict[int, Lifeline] = {}
        self._fronts: list[Front] = []
        super().__init__(url, lambda app: setattr(switch, "app", app), lambda: switch.active)

    def use(self, worker: Worker | None = None, **options: Any) -> None:
        """Serve new workers; `staging` and `backend` are theirs, the other options are the front's routes'."""
        self.leave()
        worker_options = {key: options.pop(key) for key in ("staging", "backend") if key in options}
        self._directory.front.unlink(missing_ok=True)
        self.front = Front(self._directory, RANKS)
        self._fronts.append(self.front)
        self.in_loop(self.front.opened())
        self.gate = self.front.gate
        self.workers = [self.new_worker(rank, **worker_options) for rank in range(RANKS)]
        for rank in range(RANKS):
            self.join(rank)
        self._put(create_app(self.front, **options))

    def new_worker(self, rank: int, **options: Any) -> Worker:
        """A worker that stands at a rank."""
        place = ParallelConfig(rank=rank, world_size=RANKS, tensor_parallel_size=RANKS)
        return Worker(small_model(), parallel_config=place, **{"backend": "held", **options})

    def join(self, rank: int, worker: Worker | None = None) -> None:
        """Have a rank's worker join the front."""
        if worker is not None:
            self.workers[rank] = worker
        mine = self.workers[rank]
        lifeline = Lifeline(self._directory, rank=rank, world_size=RANKS, deadline=Deadline(10.0), ended=lambda: None)
        self._lifelines[rank] = lifeline
        mine.gate = RankGate(lifeline, lambda: mine.session.update)
        self._ranks[rank].app = create_app(mine, token=self._directory.secret())
        lifeline.tell(ready=True)
        until(lambda: self.front._roster.ready(rank))

    def part(self, rank: int) -> None:
        """Break a rank's lifeline, as its death does."""
        self._lifelines[rank].close()
        until(lambda: not self.front._roster.ready(rank))

    def leave(self) -> None:
        """End the front that there is."""
        while self._lifelines:
            self._lifelines.popitem()[1].close()
        while self._fronts:
            self.in_loop(self._fronts.pop().closed())

    def in_loop(self, work: Any) -> Any:
        """Run a coroutine in the front's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._switch.loop).result(20.0)

    def __exit__(self, *unused: object) -> None:
        super().__exit__()
        self.leave()
