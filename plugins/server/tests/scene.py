"""A worker behind HTTP, brought into any state of the update by its own routes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self

import httpx
from starlette.types import ASGIApp
from torch import nn

from plugins.server.tests.held_engine import brake
from weightwire.gate import Gate, Hold
from weightwire.source import ModuleSource
from weightwire.worker import Worker
from weightwire_server import create_app

STATES = ("uninitialised", "ready", "open", "receiving", "committing", "torn")
LIMIT = 40.0


def until(holds: Callable[[], bool], *, seconds: float = LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.002)


def small_model(value: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


class Scene:
    """A worker with backend `held`, and a client of its routes.

    Args:
        url: Where the app is served.
        put: Puts an app there.
        active: How many requests are being answered there.
    """

    def __init__(self, url: str, put: Callable[[ASGIApp], None], active: Callable[[], int]) -> None:
        self.url = url
        self._put = put
        self._active = active
        self._http = httpx.Client(base_url=url, timeout=LIMIT, trust_env=False, verify=False)
        self._threads = ThreadPoolExecutor(8)
        self._readers: list[Hold] = []
        self.running: list[Future[httpx.Response]] = []
        brake.arm()
        self.use()

    def use(self, worker: Worker | None = None, **options: Any) -> None:
        """Serve a new worker."""
        self.workers = [worker or Worker(small_model(), backend="held")]
        self.gate: Gate = self.workers[0].gate
        self._put(create_app(self.workers[0], **options))

    @property
    def worker(self) -> Worker:
        """The worker, of several the first."""
        return self.workers[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        with ExitStack() as stack:
            stack.callback(self._http.close)
            stack.callback(self._threads.shutdown)
            stack.callback(self.release)

    def release(self) -> None:
        """Let go of whatever is held, and wait for the calls that were."""
        brake.release()
        while self._readers:
            self._readers.pop().__exit__(None, None, None)
        for future in self.running:
            future.result(LIMIT)

    def busy(self) -> bool:
        """Whether the server has requests that it has not answered."""
        return self._active() > 0

    # Requests

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._http.get(path, **options)

    def post(
        self,
        path: str,
        body: Any = None,
        *,
        update: str | None = None,
        sequence: int | None = None,
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> httpx.Response:
        sent = dict(headers or {})
        if update is not None:
            sent["Weightwire-Update"] = update
        if sequence is not None:
            sent["Weightwire-Sequence"] = str(sequence)
        if body is not None:
            options["json"] = body
        return self._http.post(path, headers=sent, **options)

    def later(self, call: Callable[[], httpx.Response]) -> Future[httpx.Response]:
        future = self._threads.submit(call)
        self.running.append(future)
        return future

    def waiting(self, call: Callable[[], httpx.Response]) -> Future[httpx.Response]:
        """Have `call` reach the server, and see that it is not answered."""
        before = sum(not earlier.done() for earlier in self.running)
        future = self.later(call)
        until(lambda: self._active() > before)
        for _ in range(3):  # meanwhile the server has turned to it
            assert self.get("/weight_info").status_code == 200
        assert not future.done()
        return future

    # The calls of an update

    def names(self) -> list[str]:
        return [name for name, _ in self.worker._main.model.named_parameters()]

    def init(self, **info: Any) -> httpx.Response:
        return self.post("/init_weight_transfer_engine", {"init_info": info})

    def start(self, update: str | None = None, **options: Any) -> httpx.Response:
        return self.post("/start_weight_update", update=update, **options)

    def update_info(self, names: Sequence[str] | None = None, **info: Any) -> dict[str, Any]:
        metadata = [meta.to_json() for meta in ModuleSource(self.worker._main.model).metadata]
        chosen = [record for record in metadata if names is None or record["name"] in names]
        return {"metadata": chosen, **info}

    def update(
        self, update: str | None = None, sequence: int | None = None, *, timeout: float | None = None, **info: Any
    ) -> httpx.Response:
        headers = {} if timeout is None else {"Weightwire-Timeout": str(timeout)}
        body = {"update_info": self.update_info(**info)}
        return self.post("/update_weights", body, update=update, sequence=sequence, headers=headers)

    def finish(self, update: str | None = None, label: str | None = None, **options: Any) -> httpx.Response:
        body = None if label is None else {"weight_version": label}
        return self.post("/finish_weight_update", body, update=update, **options)

    def push(self, value: float = 1.0, *, update: str | None = None, label: str | None = None) -> None:
        """A whole update."""
        for answer in (self.start(update), self.update(update, 0, value=value), self.finish(update, label)):
            assert answer.status_code == 200, answer.text

    # States

    def enter(self, state: str) -> None:
        """Bring the worker into `state`; an update that is on has id `u1`, and message 0 of it runs or ran."""
        if state == "uninitialised":
            return
        assert self.init().status_code == 200
        if state == "torn":
            assert self.post("/weight_checker", {"action": "reset"}).status_code == 200
        if state in ("open", "receiving", "committing"):
            assert self.start("u1").status_code == 200
        if state == "receiving":
            self.later(lambda: self.update("u1", 0, hold=True))
            until(lambda: all(worker.session.update == "receiving" for worker in self.workers))
        if state == "committing":
            assert self.update("u1", 0).status_code == 200
            self.read()
            self.later(lambda: self.finish("u1", "new"))
            until(lambda: self.gate._closed)

    def read(self) -> None:
        """Hold the weights until `release`."""
        self._readers.append(self.gate.reading().__enter__())

    def value(self) -> float:
        """The value that all parameters have; fails where they differ."""
        parameters = [one for worker in self.workers for one in worker._main.model.parameters()]
        values = {float(v) for parameter in parameters for v in parameter.detach().reshape(-1)}
        assert len(values) == 1, f"torn: {values}"
        return values.pop()

    def check_recovers(self) -> None:
        """Whatever came before, a trainer that comes now gets its weights in."""
        self.release()
        assert self.init().status_code == 200
        self.push(7.0, label="recovered")
        assert self.value() == 7.0
        known = self.get("/weight_info").json()
        assert (known["state"], known["weight_version"], known["weights"]) == ("ready", "recovered", "whole")
