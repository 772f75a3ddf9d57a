"""Servers for tests: a `weightwire.worker.Worker` in each of some ranks, and the client that drives them.

A rank that hosts a worker listens on a Unix socket of its own; a `RankClient` holds the addresses. It can be
handed to a trainer in the test process or in another rank, and sees a killed rank as a closed connection.

Example:
    def build(state: dict[str, Any]) -> nn.Module:
        return nn.Linear(4, 4)

    def test_push(ranks: BorrowRanks) -> None:
        client = host_workers(ranks(2), build)                                     # one server with two ranks
        fleet = FanoutClient([host_workers(ranks(1), build) for _ in range(2)])    # two servers of one rank
        sender.call(push, client)                                                  # `sender` is a rank too
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from weightwire.clients.protocol import PauseMode
from weightwire.deadline import DEFAULT_SECONDS
from weightwire.errors import DeadlineExceeded, PeerLost
from weightwire.messages import WeightTransferUpdatePayload, pick_update
from weightwire.testing.pool_process import Rank
from weightwire.testing.pool_wire import Reply, dump, load
from weightwire.testing.worker_host import host_worker

_ASK_SECONDS = 5.0
_SETTLE_SECONDS = 0.5
"""How long the other ranks may take to end once one has failed."""


def host_workers(ranks: Sequence[Rank], build: Callable[..., Any], *arguments: Any, **options: Any) -> RankClient:
    """Host one server over `ranks`, one worker each, and return its client.

    Args:
        ranks: The server's ranks; their order is the order of worker ranks.
        build: Module-level function `build(state, *arguments)` that returns the model of its rank.
        arguments: Handed to `build`.
        options: Keywords of `Worker`.
    """
    count = len(ranks)
    calls = [
        rank.start(host_worker, build, arguments, index=index, count=count, options=options)
        for index, rank in enumerate(ranks)
    ]
    addresses = [call.result() for call in calls]
    return RankClient(addresses, [f"worker rank {rank.index} (pid {rank.pid})" for rank in ranks])


class RankClient:
    """A `ControlClient` of one server whose workers are hosted in ranks; can be sent to other ranks.

    Every call goes to all ranks at once. The first error, in order of time, is raised with its class; a rank
    whose process is gone is `PeerLost`.

    Args:
        addresses: Addresses of the hosts, by worker rank.
        labels: Their names in messages.
        timeout: Deadline of a call that names none, in seconds.

    Attributes:
        grace: How much longer than the worker it waits, in seconds, so that the worker's words arrive first.
    """

    def __init__(self, addresses: Sequence[str], labels: Sequence[str], *, timeout: float = DEFAULT_SECONDS) -> None:
        self.addresses = list(addresses)
        self.labels = list(labels)
        self.timeout = timeout
        self.grace = 5.0
        self._update_id: str | None = None
        self._sequence = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
        """Have every worker connect to a trainer."""
        self._all("init", init_info, timeout=timeout)

    def start_weight_update(
        self, *, update_id: str | None = None, draft: bool = False, timeout: float | None = None
    ) -> None:
        """Open an update, under an id of its own unless one is given."""
        self._update_id, self._sequence = update_id or uuid.uuid4().hex, 0
        self._all("start", timeout=timeout, update_id=self._update_id, draft=draft)

    def update_weights(
        self,
        update_info: WeightTransferUpdatePayload,
        *,
        update_id: str | None = None,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Have every worker receive one message, or each its element of a list."""
        count = len(self.addresses)
        infos = [(pick_update(update_info, index=index, count=count),) for index in range(count)]
        number = self._sequence if sequence is None else sequence
        self._sequence = number + 1
        self._each("update", infos, timeout=timeout, update_id=update_id or self._update_id, sequence=number)

    def finish_weight_update(
        self, weight_version: str | None = None, *, update_id: str | None = None, timeout: float | None = None
    ) -> None:
        """Have every worker commit."""
        self._all("finish", weight_version, timeout=timeout, update_id=update_id or self._update_id)

    def abort_weight_update(self, *, update_id: str | None = None, timeout: float | None = None) -> None:
        """Have every worker drop the open update."""
        self._all("abort", timeout=timeout, update_id=update_id or self._update_id)

    def shutdown_weight_transfer_engine(self, *, timeout: float | None = None) -> None:
        """Have every worker leave the trainer."""
        self._all("shutdown", timeout=timeout)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Worker ranks of the server, all of which answer."""
        return len(self._all("info", timeout=_ASK_SECONDS, bounded=False))

    def weight_info(self) -> dict[str, Any]:
        """The first rank's `Worker.info`, and those of all under `ranks`."""
        infos = self._all("info", bounded=False)
        return {**infos[0], "ranks": infos}

    def checksums(self) -> list[dict[str, str]]:
        """`Worker.checksums` of every rank."""
        found: list[dict[str, str]] = self._all("checksums")
        return found

    def reset(self) -> None:
        """Have every worker zero its weights."""
        self._all("reset")

    def pause(self, mode: PauseMode = "abort", *, timeout: float | None = None) -> None:
        """Keep readers out of every worker."""
        self._all("pause", mode, timeout=timeout)

    def resume(self, *, timeout: float | None = None) -> None:
        """Let readers into every worker again."""
        self._all("resume", bounded=False)

    def _all(self, method: str, *args: Any, **options: Any) -> list[Any]:
        return self._each(method, [args] * len(self.addresses), **options)

    def _each(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        timeout: float | None = None,
        bounded: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        seconds = self.timeout if timeout is None else timeout
        sent = seconds if bounded else None
        with contextlib.ExitStack() as stack:
            waiting: dict[Connection, int] = {}
            results: dict[int, Any] = {}
            errors: list[BaseException] = []
            for index, args in enumerate(arguments):
                try:
                    connection = stack.enter_context(self._connect(index))
                    connection.send_bytes(dump((method, args, kwargs, sent)))
                    waiting[connection] = index
                except OSError as error:
                    errors.append(self._lost(index, method, error))
            self._collect(method, waiting, results, errors, monotonic() + seconds + self.grace)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and: {other}")
            raise errors[0]
        return [results[index] for index in range(len(arguments))]

    def _collect(
        self,
        method: str,
        waiting: dict[Connection, int],
        results: dict[int, Any],
        errors: list[BaseException],
        end: float,
    ) -> None:
        while waiting:
            if errors:
                end = min(end, monotonic() + _SETTLE_SECONDS)
            ready = wait(list(waiting), max(0.0, end - monotonic()))
            if not ready:
                slow = ", ".join(self.labels[index] for index in waiting.values())
                if not errors:
                    errors.append(DeadlineExceeded(f"{method} was not answered in time by {slow}"))
                return
            for connection in ready:
                assert isinstance(connection, Connection)
                index = waiting.pop(connection)
                try:
                    reply: Reply = load(connection.recv_bytes())
                except (EOFError, OSError) as error:
                    errors.append(self._lost(index, method, error))
                    continue
                if reply.failure is not None:
                    errors.append(reply.failure.rebuild(f"{method} on {self.labels[index]}"))
                else:
                    results[index] = load(reply.value)

    def _connect(self, index: int) -> Connection:
        with socket.socket(socket.AF_UNIX) as connecting:
            connecting.connect(self.addresses[index])
            return Connection(connecting.detach())

    def _lost(self, index: int, method: str, error: BaseException) -> PeerLost:
        lost = PeerLost(f"{self.labels[index]} was lost during {method}: its process is gone")
        lost.__cause__ = error
        return lost
