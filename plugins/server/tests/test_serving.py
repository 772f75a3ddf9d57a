"""Serving: on a socket of its own, in a user's app, in a process; and who may reach it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from plugins.server.tests.held_engine import brake
from plugins.server.tests.scene import Scene, small_model, until
from weightwire.clients.http import HTTPVLLMWeightSyncClient
from weightwire.errors import Busy, Paused, Unauthorized
from weightwire.worker import Worker
from weightwire_server import BoundServer, control_routes, create_app, serve
from weightwire_server.call_threads import CallThreads

PROGRAM = """
from torch import nn
from weightwire import Worker
from weightwire_server import serve
serve(Worker(nn.Linear(2, 2)), ready=lambda url: print(url, flush=True))
print("ended in order", flush=True)
"""


def test_mounted_in_an_app_with_routes_of_its_own() -> None:
    worker = Worker(small_model(2.0), backend="held")

    async def generate(request: Request) -> JSONResponse:
        async with worker.reading():
            return JSONResponse({"answer": float(next(worker._main.model.parameters()).detach().sum())})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "mine"})

    async def paused(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"later": str(error)}, status_code=503)

    app = Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/weights/health", health),
            Mount("/weights", routes=control_routes(worker)),
        ],
        exception_handlers={Paused: paused},
    )
    with BoundServer(app) as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        client = HTTPVLLMWeightSyncClient(f"{server.url}/weights/")
        assert http.post("/generate").json() == {"answer": 24.0}
        assert http.get("/weights/health").json() == {"status": "mine"}
        assert http.get("/weight_info").status_code == 404
        client.init_weight_transfer_engine({})
        client.pause("wait")
        assert http.post("/generate").status_code == 503
        client.resume()
        assert http.post("/generate").status_code == 200
        assert client.weight_info()["state"] == "ready"
        client.close()


def test_the_port_is_known_before_anything_is_served() -> None:
    server = BoundServer(create_app(Worker(small_model())))
    assert server.url == f"http://127.0.0.1:{server.port}"
    with pytest.raises(OSError):
        BoundServer(create_app(Worker(small_model())), port=server.port)
    with server:
        assert httpx.get(f"{server.url}/health", trust_env=False).is_success
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", trust_env=False)
    server.stop()


def test_stopping_leaves_the_trainer_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightwire_server.call_threads._IDLE_SECONDS", 0.01)
    before = set(threading.enumerate())
    worker = Worker(small_model(), backend="held")
    with BoundServer(create_app(worker)) as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        assert http.post("/init_weight_transfer_engine", json={"init_info": {}}).is_success
        assert http.post("/start_weight_update").is_success
        assert worker.state == "updating"
    assert worker.state == "uninitialised"
    until(lambda: set(threading.enumerate()) <= before)


def test_stopping_ends_what_runs() -> None:
    brake.arm()
    worker = Worker(small_model(), backend="held")
    server = BoundServer(create_app(worker), timeout_graceful_shutdown=1)
    with server, ThreadPoolExecutor(1) as threads:
        body = {"init_info": {"hold": True}}
        answer = threads.submit(httpx.post, f"{server.url}/init_weight_transfer_engine", json=body, trust_env=False)
        until(lambda: worker.session._busy == "init")
        server.stop()
        assert answer.result(5.0).status_code == 502
        assert "the server was stopped during init_weight" in answer.result().json()["error"]["message"]
    assert worker.session.idle


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_other_machines_need_a_token(host: str) -> None:
    with pytest.raises(Unauthorized, match="token"):
        serve(Worker(small_model()), host=host)


@pytest.mark.thorough
def test_ctrl_c_ends_a_process_that_serves_in_order() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert httpx.get(f"{url}/weight_info", trust_env=False, timeout=10.0).json()["state"] == "uninitialised"
        process.send_signal(signal.SIGINT)
        words, _ = process.communicate(timeout=20)
        assert (words.strip(), process.returncode) == ("ended in order", 0)
    finally:
        process.kill()
        process.communicate()


def test_answers_are_not_delayed(scene: Scene) -> None:
    host, port = scene.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_call_threads() -> None:
    async def check() -> None:
        threads = CallThreads("test", limit=2)
        gate = threading.Event()
        held = [threads.submit(gate.wait) for _ in range(2)]
        with pytest.raises(Busy, match="2 test calls"):
            threads.submit(gate.wait)
        held[0].cancel()
        gate.set()
        assert await held[1]
        until(lambda: threads._running == 0)
        with pytest.raises(ZeroDivisionError):
            await threads.submit(lambda: 1 // 0)
        names = await asyncio.gather(*(threads.submit(lambda: threading.current_thread().name) for _ in range(2)))
        assert set(names) == {"weightwire-test"}

    asyncio.run(check())
