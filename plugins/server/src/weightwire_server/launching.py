"""A model served by one rank or by several, as `weightwire serve` does it.

Several ranks come from here (`workers`), or from a launcher such as torchrun that has set RANK and WORLD_SIZE; the
program is the same, and every rank runs it. A front alone imports no torch.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute

from weightwire.deadline import Deadline
from weightwire.errors import MessageError, PeerLost, Unsupported
from weightwire.messages import ParallelConfig
from weightwire_server.access import require_token_beyond_loopback
from weightwire_server.app import create_app
from weightwire_server.front import Front
from weightwire_server.lifeline import Lifeline
from weightwire_server.private_directory import DIRECTORY_VARIABLE, PrivateDirectory
from weightwire_server.processes import RankProcesses
from weightwire_server.rank_server import RankServer
from weightwire_server.serving import BoundServer, tell

if TYPE_CHECKING:
    from weightwire.worker import Worker

_LAUNCHED_JOIN_SECONDS = 300.0
_JOIN_SECONDS = 10.0
_LAST_SECONDS = 10.0
_DESCRIPTORS = 65536


@dataclass(frozen=True, slots=True)
class Listening:
    """What callers meet.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        token: Bearer token that callers have to send.
        routes: Makes routes of your own, which come first, for the worker or the front that is served.
        ready: Called with the URL once all ranks are there; the default is a line on standard error.
        server_options: More of `BoundServer`.
        route_options: More of `control_routes`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = field(default=None, repr=False)
    routes: Callable[[Any], Sequence[BaseRoute]] = lambda served: ()
    ready: Callable[[str], None] = tell
    server_options: dict[str, Any] = field(default_factory=dict)
    route_options: dict[str, Any] = field(default_factory=dict)

    def bound(self, served: Worker | Front) -> BoundServer:
        """A server on that address.

        Raises:
            Unauthorized: It reaches beyond loopback and there is no token.
            OSError: The address cannot be had.
        """
        require_token_beyond_loopback(self.host, self.token)
        app = create_app(served, routes=self.routes(served), token=self.token, **self.route_options)
        return BoundServer(app, host=self.host, port=self.port, **self.server_options)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among the ranks, by its environment."""

    rank: int
    world_size: int
    front: PrivateDirectory | None

    @classmethod
    def of(cls, environment: os._Environ[str]) -> Place:
        """Read RANK and WORLD_SIZE, and where the front is that has started this process, if one has.

        Raises:
            Unsupported: The launcher's ranks are on several machines.
        """
        rank, world_size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
        if int(environment.get("LOCAL_WORLD_SIZE", world_size)) != world_size:
            raise Unsupported(
                "the ranks of one server are on one machine: run a launcher on each, and drive them with FanoutClient"
            )
        front = environment.get(DIRECTORY_VARIABLE)
        return cls(rank, world_size, None if front is None else PrivateDirectory(Path(front)))


def launch(
    load: Callable[[], Any],
    listening: Listening | None = None,
    *,
    workers: int = 1,
    command: Sequence[str] | None = None,
    worker_options: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Serve until SIGINT comes.

    Args:
        load: Makes the model of this rank; only called in a process that is a rank.
        listening: What callers meet.
        workers: Ranks to start; what a launcher has started already is taken as it is.
        command: How to start this very program again, for the ranks; None takes this process's own command.
        worker_options: As for `Worker`.

    Raises:
        Unauthorized: The address reaches beyond loopback and there is no token.
        OSError: The address cannot be had.
        PeerLost: A rank ended before all were ready.
        KeyboardInterrupt: SIGINT came before all were ready.
    """
    listening = listening or Listening()
    _take_all_descriptors()
    place = Place.of(os.environ)

    def worker() -> Worker:
        model = load()  # before anything slow: it may be refused
        from weightwire.worker import Worker

        parallel = ParallelConfig(rank=place.rank, world_size=place.world_size, tensor_parallel_size=place.world_size)
        return Worker(model, parallel_config=parallel, **worker_options)

    if place.front is not None:
        # Joined before anything is loaded: this process ends with its front from its first second on.
        lifeline = _joined(place, place.front, _JOIN_SECONDS)
        RankServer(lifeline, worker()).run()
    elif place.world_size > 1:
        if workers not in (1, place.world_size):
            raise MessageError(f"the launcher has started {place.world_size} ranks, not {workers}: leave that to it")
        _serve_launched(place, worker, listening)
    elif workers > 1:
        _serve_processes(command or [sys.executable, *sys.orig_argv[1:]], workers, listening)
    else:
        require_token_beyond_loopback(listening.host, listening.token)
        server = listening.bound(worker())
        listening.ready(server.url)
        server.run()


def _serve_launched(place: Place, worker: Callable[[], Worker], listening: Listening) -> None:
    """Be one of a launcher's ranks; rank 0 has the front beside its own."""
    directory = PrivateDirectory.of_launcher(os.environ)
    # Loaded first: a factory may form a process group, for which the launcher's ranks have to come together.
    if place.rank > 0:
        loaded = worker()
        RankServer(_joined(place, directory, _LAUNCHED_JOIN_SECONDS), loaded).run()
        return
    directory.create()
    try:
        loaded = worker()
        front = Front(directory, place.world_size, complete=lambda: listening.ready(server.url))
        server = listening.bound(front)

        def be_rank() -> None:
            RankServer(_joined(place, directory, _LAUNCHED_JOIN_SECONDS, end=False), loaded).run()

        threading.Thread(target=be_rank, name="weightwire-rank", daemon=True).start()
        server.run()
    finally:
        directory.remove()


def _serve_processes(command: Sequence[str], workers: int, listening: Listening) -> None:
    """Be the front of ranks that are started here."""
    directory = PrivateDirectory.fresh()
    early: list[str] = []
    complete = threading.Event()

    def ready() -> None:
        complete.set()
        listening.ready(server.url)

    def ended(words: str) -> None:
        if not complete.is_set():
            early.append(words)
            server.end()

    try:
        processes = RankProcesses(command, workers, directory, ended=ended)
        server = listening.bound(Front(directory, workers, starter=processes, complete=ready))
        server.run()
    finally:
        directory.remove()
    if early:
        raise PeerLost(f"{early[0]} before all ranks were ready; what it wrote says why")
    if not complete.is_set():
        raise KeyboardInterrupt


def _joined(place: Place, directory: PrivateDirectory, seconds: float, *, end: bool = True) -> Lifeline:
    """Join the front in `directory`; `end` this process when it is gone."""

    def ended() -> None:
        if end:
            _end_this_process(place.front)

    deadline = Deadline(seconds, what=f"rank {place.rank}'s wait for its front")
    return Lifeline(directory, rank=place.rank, world_size=place.world_size, deadline=deadline, ended=ended)


def _end_this_process(directory: PrivateDirectory | None) -> None:
    """The front is gone, and cannot clean up: end in order, or anyhow."""
    if directory is not None:
        directory.remove()
    sys.stderr.write(f"weightwire: process {os.getpid()} ends, its front is gone\n")
    with suppress(ProcessLookupError):
        os.kill(os.getpid(), signal.SIGTERM)
    timer = threading.Timer(_LAST_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _take_all_descriptors() -> None:
    """A connection costs a descriptor; the usual soft limit is there for programs that know no more than 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
