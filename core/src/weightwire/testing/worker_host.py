"""What runs inside a rank that hosts a `weightwire.worker.Worker` for a test."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from weightwire.deadline import Deadline
from weightwire.errors import WeightwireError
from weightwire.messages import ParallelConfig
from weightwire.testing.pool_rank import at_tidy
from weightwire.testing.pool_wire import Failure, Reply, dump, load
from weightwire.worker import Worker

State = dict[str, Any]


class WorkerHost:
    """Serves the methods of a worker on a Unix socket, each call in a thread of its own.

    Args:
        worker: A `Worker`, or for tests of the client anything with its methods.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.address = f"\0weightwire-{os.getpid()}-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, name="worker-host", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Abort an open update, leave the trainer, stop listening."""
        with contextlib.suppress(WeightwireError):
            self.worker.abort(deadline=Deadline(1.0))
        with contextlib.suppress(WeightwireError):
            self.worker.shutdown(deadline=Deadline(1.0))
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            _, user, _ = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():
                accepted.close()
                continue
            connection = Connection(accepted.detach())
            threading.Thread(target=self._answer, args=(connection,), name="worker-call", daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            method, args, kwargs, timeout = load(connection.recv_bytes())
            if timeout is not None:
                kwargs["deadline"] = Deadline(timeout, what=method)
            try:
                reply = Reply(0, value=dump(getattr(self.worker, method)(*args, **kwargs)))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is raised again in the client's process
                reply = Reply(0, failure=Failure.of(error))
            connection.send_bytes(dump(reply))


def host_worker(
    state: State,
    build: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    index: int,
    count: int,
    options: dict[str, Any],
) -> str:
    """Build a model and host a worker for it in this rank, the `index`-th of `count`; returns the address."""
    model = build(state, *arguments)
    parallel = ParallelConfig(rank=index, world_size=count, tensor_parallel_size=count)
    return host(state, Worker(model, parallel_config=parallel, **options))


def host(state: State, worker: Any) -> str:
    """Host `worker` in this rank until the test ends; returns the address."""
    server = WorkerHost(worker)
    state["worker"] = worker
    at_tidy(server.close)
    return server.address


def worker_of(state: State) -> Worker:
    """The worker hosted in this rank, for functions of a test."""
    worker: Worker = state["worker"]
    return worker
