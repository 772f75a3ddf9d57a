"""Several servers as one: every call goes to all of them at once, and any failure is everybody's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from weightwire.clients.protocol import ControlClient, PauseMode
from weightwire.errors import MessageError
from weightwire.messages import WeightTransferUpdatePayload


class FanoutClient:
    """Drives several servers as one; worker ranks are counted through in the order of `clients`.

    Args:
        clients: One client per server. The list may be changed between updates: a server that is gone is left out
            of the next link by removing its client.

    Raises:
        MessageError: No client.
    """

    def __init__(self, clients: Sequence[ControlClient]) -> None:
        if not clients:
            raise MessageError("FanoutClient needs at least one client")
        self.clients = list(clients)

    def _all(self, call: Callable[[ControlClient, int], Any]) -> list[Any]:
        """Run `call(client, position)` on every client at once; raises the first error as soon as there is one.

        The other calls are not waited for then: they may be waiting for the server that failed.
        """
        threads = ThreadPoolExecutor(len(self.clients), thread_name_prefix="weightwire-fanout")
        try:
            futures = [threads.submit(call, client, at) for at, client in enumerate(self.clients)]
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            errors = [error for future in futures if future in ended and (error := future.exception()) is not None]
            if errors:
                raise errors[0]
            return [future.result() for future in futures]
        finally:
            threads.shutdown(wait=False)

    def _sizes(self) -> list[int]:
        sizes: list[int] = self._all(lambda client, at: client.get_world_size(include_dp=True))
        return sizes

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
        """Connect every server, each with the rank offset of its place."""
        sizes = self._sizes()

        def initialise(client: ControlClient, at: int) -> None:
            before = sum(sizes[:at])
            mine = copy.deepcopy(init_info)
            if isinstance(mine.get("rank_offset"), int):
                mine["rank_offset"] += before
            if isinstance(mine.get("weightwire"), dict):
                mine["weightwire"]["worker_offset"] = mine["weightwire"].get("worker_offset", 0) + before
            client.init_weight_transfer_engine(mine, timeout=timeout)

        self._all(initialise)

    def start_weight_update(
        self, *, update_id: str | None = None, draft: bool = False, timeout: float | None = None
    ) -> None:
        """Open an update on every server."""
        self._all(lambda client, at: client.start_weight_update(update_id=update_id, draft=draft, timeout=timeout))

    def update_weights(
        self,
        update_info: WeightTransferUpdatePayload,
        *,
        update_id: str | None = None,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Have every server receive one message; a list has one element per worker rank of all servers."""
        sizes = self._sizes() if isinstance(update_info, list) else [1] * len(self.clients)
        if isinstance(update_info, list) and len(update_info) != sum(sizes):
            raise MessageError(
                f"update_info lists {len(update_info)} elements for {sum(sizes)} workers: give one per worker rank"
            )

        def update(client: ControlClient, at: int) -> None:
            mine = update_info
            if isinstance(update_info, list):
                before = sum(sizes[:at])
                mine = update_info[before : before + sizes[at]]
            client.update_weights(mine, update_id=update_id, sequence=sequence, timeout=timeout)

        self._all(update)

    def finish_weight_update(
        self, weight_version: str | None = None, *, update_id: str | None = None, timeout: float | None = None
    ) -> None:
        """Have every server commit."""
        self._all(lambda client, at: client.finish_weight_update(weight_version, update_id=update_id, timeout=timeout))

    def abort_weight_update(self, *, update_id: str | None = None, timeout: float | None = None) -> None:
        """Have every server drop the open update."""
        self._all(lambda client, at: client.abort_weight_update(update_id=update_id, timeout=timeout))

    def shutdown_weight_transfer_engine(self, *, timeout: float | None = None) -> None:
        """Have every server leave the trainer."""
        self._all(lambda client, at: client.shutdown_weight_transfer_engine(timeout=timeout))

    def get_world_size(self, include_dp: bool = True) -> int:
        """Worker ranks of all servers together."""
        return sum(self._all(lambda client, at: client.get_world_size(include_dp=include_dp)))

    def weight_info(self) -> dict[str, Any]:
        """What each server says, under `servers`, and the first one's label and revision."""
        answers = self._all(lambda client, at: client.weight_info())
        return {**answers[0], "servers": answers}

    def pause(self, mode: PauseMode = "abort", *, timeout: float | None = None) -> None:
        """Keep readers out of every server."""
        self._all(lambda client, at: client.pause(mode, timeout=timeout))

    def resume(self, *, timeout: float | None = None) -> None:
        """Let readers into every server again."""
        self._all(lambda client, at: client.resume(timeout=timeout))
