"""A server's ranks as processes of their own: started fresh, replaced when they end, ended with the front."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from weightwire_server.private_directory import DIRECTORY_VARIABLE, PrivateDirectory

_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 30.0

_TERM_SECONDS = 6.0


class RankProcesses:
    """Starts one process per rank with the variables of a launcher: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...

    Args:
        command: Program and arguments, the same for all ranks.
        world_size: How many.
        directory: Where the front is; the ranks find it in `WEIGHTWIRE_FRONT`.
        ended: Called in the event loop with how a process ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        world_size: int,
        directory: PrivateDirectory,
        *,
        ended: Callable[[str], None],
    ) -> None:
        self._command = list(command)
        self._world_size = world_size
        self._directory = directory
        self._port = _free_port()
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._ended = ended

    async def open(self, explain: Callable[[int, str], bool]) -> None:
        """Start all, and keep them running: one that has served, at once; one that never got so far, after a while."""
        self._keepers = [asyncio.create_task(self._keep(rank, explain)) for rank in range(self._world_size)]

    async def close(self) -> None:
        """End all: SIGTERM, and 6 s later SIGKILL."""
        for keeper in self._keepers:
            keeper.cancel()
        running = list(self._running.values())
        for process in running:
            _signal(process, signal.SIGTERM)
        ends = [asyncio.create_task(process.wait()) for process in running]
        if ends:
            await asyncio.wait(ends, timeout=_TERM_SECONDS)
        for process in running:
            _signal(process, signal.SIGKILL)
        await asyncio.gather(*ends)

    async def _keep(self, rank: int, explain: Callable[[int, str], bool]) -> None:
        delay = 0.0
        while True:
            words = f"rank {rank} {await self._run(rank)}"
            served = explain(rank, words)
            self._ended(words)
            delay = 0.0 if served else min(max(2 * delay, _FIRST_DELAY_SECONDS), _LONGEST_DELAY_SECONDS)
            await asyncio.sleep(delay)

    async def _run(self, rank: int) -> str:
        """Start a rank and wait for its end; returns how that came."""
        try:
            # A session of its own: Ctrl-C comes to the front alone, which ends its ranks in order.
            process = await asyncio.create_subprocess_exec(
                *self._command, env=self._environment(rank), stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            return f"cannot be started: {error}"
        self._running[rank] = process
        return f"(pid {process.pid}) {_how_it_ended(await process.wait())}"

    def _environment(self, rank: int) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != "WEIGHTWIRE_TOKEN"}
        return inherited | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            DIRECTORY_VARIABLE: str(self._directory.path),
        }


def _free_port() -> int:
    """A port for the ranks' own process group, if their factory makes one; the front does not use it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
