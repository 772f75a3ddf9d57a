"""While a transfer runs: control calls answer, deadlines hold, and a client that goes away ends it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from plugins.server.tests.held_engine import brake
from plugins.server.tests.scene import Scene, small_model, until
from weightwire.clients.http import HTTPVLLMWeightSyncClient
from weightwire.errors import OrderError, PeerLost, Unauthorized, UpdateRefused, WeightsTorn
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_rank import at_tidy
from weightwire.worker import Worker
from weightwire_nccl import NCCLTrainerInitInfo
from weightwire_server import BoundServer, create_app

State = dict[str, Any]


def test_control_calls_answer_during_an_update(scene: Scene) -> None:
    scene.enter("receiving")
    known = scene.get("/weight_info").json()
    assert (known["state"], known["update"], known["update_id"]) == ("updating", "receiving", "u1")
    for answer in (
        scene.get("/health"),
        scene.get("/metrics"),
        scene.post("/pause?mode=wait"),
        scene.post("/resume"),
        scene.post("/weight_checker", {"action": "checksum"}),
    ):
        assert answer.status_code == 200, answer.text
    assert not scene.running[-1].done()
    scene.release()
    assert scene.finish("u1").status_code == 200


def test_control_calls_answer_while_repetitions_wait(scene: Scene) -> None:
    scene.enter("receiving")
    repetitions = [scene.waiting(lambda: scene.update("u1", 0)) for _ in range(5)]
    assert scene.post("/abort_weight_update").status_code == 200
    assert {future.result(2.0).status_code for future in repetitions} == {409}


def test_more_calls_than_threads_are_refused() -> None:
    async def crowd() -> list[int]:
        worker = Worker(small_model(), backend="held")
        transport = httpx.ASGITransport(create_app(worker))
        brake.arm()
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            await client.post("/init_weight_transfer_engine", json={"init_info": {}})
            headers = {"Weightwire-Update": "u", "Weightwire-Sequence": "0"}
            await client.post("/start_weight_update", headers=headers)
            metadata = [meta.to_json() for meta in ModuleSource(small_model()).metadata]
            body = {"update_info": {"metadata": metadata, "hold": True}}
            calls = [asyncio.create_task(client.post("/update_weights", json=body, headers=headers)) for _ in range(20)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            brake.release()
            return sorted([(await call).status_code for call in calls])

    assert asyncio.run(crowd()) == [200] * 16 + [503] * 4


def test_the_client_s_deadline_ends_an_update(scene: Scene) -> None:
    scene.enter("open")
    answer = scene.update("u1", 0, hold=True, timeout=0.1)
    assert answer.status_code == 504
    assert "update_weights" in answer.json()["error"]["message"]
    scene.check_recovers()


def test_the_server_s_deadline_is_the_limit(scene: Scene) -> None:
    scene.use(timeout=0.1)
    scene.enter("open")
    assert scene.update("u1", 0, hold=True, timeout=60.0).status_code == 504


def test_readers_that_outlast_finish(scene: Scene) -> None:
    scene.enter("open")
    scene.update("u1", 0)
    scene.read()
    answer = scene.finish("u1", headers={"Weightwire-Timeout": "0.1"})
    assert answer.status_code == 503
    assert "readers" in answer.json()["error"]["message"]
    assert scene.value() == 0.0
    scene.check_recovers()


def test_in_place_updates_keep_readers_out(scene: Scene) -> None:
    scene.use(Worker(small_model(), backend="held", staging="in_place"))
    scene.enter("receiving")
    until(lambda: scene.get("/health").status_code == 503)
    scene.release()
    assert scene.finish("u1").status_code == 200
    assert scene.get("/health").status_code == 200

    scene.start("u2")
    assert scene.update("u2", 0, fail="half-way").status_code == 500
    assert scene.get("/weight_info").json()["weights"] == "torn"
    with pytest.raises(WeightsTorn):
        scene.worker.reading().__enter__()
    scene.check_recovers()


@contextmanager
def raw_call(scene: Scene, path: str, body: dict[str, Any], *headers: str) -> Iterator[None]:
    """A request on a connection of its own, which is closed at the end, with no answer read."""
    content = json.dumps(body).encode()
    host, port = scene.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(content)}", *headers, "", ""]
        connection.sendall("\r\n".join(lines).encode() + content)
        until(lambda: scene.worker.session._busy in ("update", "init"))
        yield


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/update_weights"])
def test_hanging_up_ends_the_call(scene: Scene, path: str) -> None:
    body: dict[str, Any] = {"init_info": {"hold": True}}
    if path == "/update_weights":
        scene.enter("open")
        body = {"update_info": scene.update_info(hold=True)}
    with raw_call(scene, path, body):
        assert not brake.ended
    until(lambda: bool(brake.ended), seconds=2.0)
    (error,) = brake.ended
    assert isinstance(error, PeerLost)
    assert str(error) == f"the trainer's connection closed during {path[1:]}"
    until(lambda: scene.worker.session.idle)
    assert scene.value() == 0.0
    scene.check_recovers()


def test_a_call_that_was_repeated_outlives_its_connection(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightwire_server.callers.GRACE_SECONDS", 0.0)
    scene.enter("open")
    body = {"update_info": scene.update_info(hold=True, value=3.0)}
    with raw_call(scene, "/update_weights", body, "Weightwire-Update: u1", "Weightwire-Sequence: 0"):
        again = scene.waiting(lambda: scene.update("u1", 0))
    for _ in range(5):  # meanwhile the server has seen the first connection close
        assert scene.get("/weight_info").json()["update"] == "receiving"
    assert not again.done()
    scene.release()
    assert again.result().status_code == 200
    assert scene.finish("u1").status_code == 200
    assert scene.value() == 3.0


# Processes of their own


def host(state: State, backend: str | None, **options: Any) -> str:
    """Serve a worker in this rank; returns its URL."""
    brake.arm()  # an earlier test may have had this rank
    state["worker"] = worker = Worker(small_model(), backend=backend)
    server = BoundServer(create_app(worker, **options))
    server.start()
    at_tidy(server.stop)  # and the worker leaves its trainer
    return server.url


def call_update(state: State, url: str, body: dict[str, Any]) -> int:
    """Send an update from this rank and wait for its answer."""
    return httpx.post(f"{url}/update_weights", json=body, timeout=60.0, trust_env=False).status_code


def how_it_ended(state: State) -> list[str]:
    """What the updates in this rank ended with."""
    return [f"{type(error).__name__}: {error}" for error in brake.ended]


@pytest.mark.parametrize("way", ["kill", "stop"])
def test_a_client_that_is_killed_ends_its_update(ranks: BorrowRanks, way: str) -> None:
    server, trainer = ranks(2)
    url = server.call(host, "held")
    with httpx.Client(base_url=url, trust_env=False) as operator:
        operator.post("/init_weight_transfer_engine", json={"init_info": {}}).raise_for_status()
        operator.post("/start_weight_update").raise_for_status()
        metadata = [meta.to_json() for meta in ModuleSource(small_model()).metadata]
        trainer.start(call_update, url, {"update_info": {"metadata": metadata, "hold": True}})
        until(lambda: operator.get("/weight_info").json()["update"] == "receiving")
        if way == "stop":  # its connection stays open, so only an abort ends it
            trainer.stop()
            operator.post("/abort_weight_update").raise_for_status()
            ended = "TransferAborted: the update was aborted"
        else:
            trainer.kill()
            ended = "PeerLost: the trainer's connection closed during update_weights"
        began = time.monotonic()
        until(lambda: operator.get("/weight_info").json()["state"] == "uninitialised")
        assert time.monotonic() - began < 2.0
        assert server.call(how_it_ended)[0].startswith(ended)
        operator.post("/init_weight_transfer_engine", json={"init_info": {}}).raise_for_status()
        operator.post("/start_weight_update").raise_for_status()
        body = {"update_info": {"metadata": metadata, "value": 5.0}}
        operator.post("/update_weights", json=body).raise_for_status()
        operator.post("/finish_weight_update").raise_for_status()
        assert operator.get("/weight_info").json()["state"] == "ready"


def checksum(state: State) -> dict[str, str]:
    """Checksums of the worker in this rank."""
    found: dict[str, str] = state["worker"].checksums()
    return found


def test_a_push_between_processes(ranks: BorrowRanks) -> None:
    (server,) = ranks(1)
    client = HTTPVLLMWeightSyncClient(server.call(host, None, token="t0ken"), token="t0ken")
    model = small_model(2.5)
    trainer = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(timeout=30.0), client=client, source=ModuleSource(model)
    )
    try:
        report = trainer.send_weights(weight_version="one", pause="keep")
        known = client.weight_info()
        assert (known["weight_version"], known["revision"], known["gate"]) == ("one", report.revision, "open")
        assert server.call(checksum) == Worker(model).checksums()
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        assert trainer.send_weights(weight_version="two").previous == report.revision
        assert server.call(checksum) == Worker(model).checksums()
    finally:
        trainer.shutdown()
        client.close()


def test_a_refusal_reaches_the_trainer_as_what_it_was(ranks: BorrowRanks) -> None:
    (server,) = ranks(1)
    url = server.call(host, None, token="t0ken")
    thief = HTTPVLLMWeightSyncClient(url, token="stolen")
    with pytest.raises(Unauthorized, match="the token is not the one"):
        thief.weight_info()
    thief.close()
    client = HTTPVLLMWeightSyncClient(url, token="t0ken")
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(1, 1))
    trainer = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(timeout=30.0), client=client, source=ModuleSource(model)
    )
    try:
        with pytest.raises(UpdateRefused, match=r"2\.weight"):
            trainer.send_weights()
        assert client.weight_info()["state"] == "ready"
    finally:
        trainer.shutdown()
        client.close()


def test_a_second_trainer_needs_takeover_while_the_first_is_alive(ranks: BorrowRanks) -> None:
    (server,) = ranks(1)
    client = HTTPVLLMWeightSyncClient(server.call(host, None))
    trainers = []

    def trainer(**options: Any) -> Any:
        made = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(timeout=30.0, **options), client=client, source=ModuleSource(small_model(2.5))
        )
        trainers.append(made)
        return made

    try:
        first = trainer()
        with pytest.raises(OrderError, match="takeover"):
            trainer()
        second = trainer(takeover=True)
        report = second.send_weights(weight_version="second")
        with pytest.raises(OrderError, match="takeover"):  # its link is gone, and it may not take it back by itself
            first.send_weights(weight_version="first")
        known = client.weight_info()
        assert (known["weight_version"], known["revision"]) == ("second", report.revision)
        second.send_weights()
    finally:
        for made in trainers:
            made.shutdown()
        client.close()
