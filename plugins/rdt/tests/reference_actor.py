"""An actor with the methods of vLLM's `AsyncLLM`, and what a rank does with the client that drives it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from weightwire.clients.protocol import ControlPlane
from weightwire.errors import MessageError, UpdateRefused
from weightwire_rdt import RayVLLMWeightSyncClient
from weightwire_rdt.cluster import join_cluster

State = dict[str, Any]


class Engine:
    """Notes what it is called with; `update_info["do"]` says how an update goes."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._calls: list[list[Any]] = []

    def get_world_size(self, include_dp: bool = True) -> int:
        return self._workers if include_dp else 1

    def calls(self) -> list[list[Any]]:
        return self._calls

    def init_weight_transfer_engine(self, request: Any) -> None:
        self._calls.append(["init", type(request).__name__, request.init_info])

    def start_weight_update(self) -> None:
        self._calls.append(["start"])

    async def update_weights(self, request: Any) -> None:
        self._calls.append(["update", type(request).__name__, request.update_info])
        do = request.update_info.get("do") if isinstance(request.update_info, dict) else None
        if do == "refuse":
            raise UpdateRefused("no such parameter", parameter="lm_head.weight")
        if do == "pass on":
            raise Exception("Call to collective_rpc method failed: OrderError: start_weight_update comes first")
        if do == "break":
            raise RuntimeError("a line,\nand another")
        if do == "hang":
            await asyncio.sleep(3600)
        if do == "die":
            os.kill(os.getpid(), signal.SIGKILL)

    def finish_weight_update(self) -> None:
        self._calls.append(["finish"])

    def update_weight_version(self, new_version: str) -> None:
        self._calls.append(["version", new_version])


class Silent:
    """Lacks what a trainer asks for first."""


def start(state: State, count: int) -> None:
    """Start actors of it, and a client of all."""
    ray = join_cluster()
    cls = ray.remote(num_cpus=0)(Engine)
    state["actors"] = [cls.remote(3) for _ in range(count)]
    state["client"] = RayVLLMWeightSyncClient(state["actors"], timeout=30)
    ray.get([one.calls.remote() for one in state["actors"]], timeout=30)


def push(state: State, label: str | None, update_info: Any) -> list[Any]:
    """One update as a trainer engine drives it; returns the number of workers and what each actor was called with."""
    client = state["client"]
    count = ControlPlane(client).world_size()
    client.init_weight_transfer_engine({"master_port": 1})
    client.start_weight_update()
    client.update_weights(update_info)
    client.finish_weight_update(label)
    return [count, join_cluster().get([one.calls.remote() for one in state["actors"]], timeout=30)]


def update(state: State, do: str, seconds: float = 30) -> None:
    """One update that goes wrong."""
    state["client"].timeout = seconds
    state["client"].update_weights({"do": do})


def drive_silent(state: State) -> None:
    """Start an update on an actor without the methods; the actor's process is never needed."""
    ray = join_cluster()
    client = RayVLLMWeightSyncClient(ray.remote(num_cpus=0)(Silent).remote())
    assert ControlPlane(client).world_size() is None
    client.start_weight_update()


def no_handle(state: State) -> None:
    """Make a client of nothing."""
    try:
        RayVLLMWeightSyncClient([])
    except MessageError:
        return
    raise AssertionError("it was made")


def let_go(state: State) -> None:
    """End the actors."""
    ray = join_cluster()
    for one in state.pop("actors"):
        ray.kill(one)
    state.clear()
