"""What the control plane costs: a whole round of four small tensors over HTTP, against four bare requests.

The bytes go over the transport named `nccl`, which has to be installed; the server itself knows no transport.
"""

from __future__ import annotations

from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from weightwire.clients.http import HTTPVLLMWeightSyncClient
from weightwire.registry import WeightTransferTrainerFactory, engine_class
from weightwire.source import ModuleSource
from weightwire.testing.measure import Case, Options, Seat, Way, equal_tensors
from weightwire.worker import Worker
from weightwire_server.app import create_app
from weightwire_server.serving import BoundServer

_TRANSPORT = "nccl"


class ServerWay(Way):
    """`send_weights` to a worker server."""

    name = "server"
    weighed_rounds = 1

    def offer(self, seat: Seat) -> str:
        """Serve the worker."""
        self._server = BoundServer(create_app(Worker(seat.model)))
        self._server.start()
        return self._server.url

    def connect(self, seat: Seat, offers: list[str]) -> None:
        """Open the link."""
        if seat.sends:
            init_info = engine_class("trainer", _TRANSPORT).init_info_cls()
            self._client = HTTPVLLMWeightSyncClient(offers[0])
            self._trainer = WeightTransferTrainerFactory.trainer_init(
                init_info, client=self._client, source=ModuleSource(seat.model)
            )

    def step(self, seat: Seat) -> dict[str, Any] | None:
        """Send once."""
        if not seat.sends:
            return None
        report = self._trainer.send_weights()
        return {f"{phase}_milliseconds": 1e3 * seconds for phase, seconds in report.seconds.items()}

    def close(self, seat: Seat) -> None:
        """Leave."""
        if seat.sends:
            self._trainer.shutdown()
            self._client.close()
        else:
            self._server.stop()


class FourRequests(Way):
    """Four POST requests on one connection to an app that answers at once; nothing is moved."""

    name = "four_requests"
    weighed_rounds = 1

    def offer(self, seat: Seat) -> str:
        """Serve the app."""

        async def answer(request: Request) -> JSONResponse:
            await request.json()
            return JSONResponse({"message": "ok"})

        self._server = BoundServer(Starlette(routes=[Route("/", answer, methods=["POST"])]))
        self._server.start()
        return self._server.url

    def connect(self, seat: Seat, offers: list[str]) -> None:
        """Connect."""
        if seat.sends:
            self._client = httpx.Client(base_url=offers[0], trust_env=False)

    def step(self, seat: Seat) -> None:
        """Four requests."""
        if seat.sends:
            for _ in range(4):
                self._client.post("/", json={"update_info": {"round": 1}}).raise_for_status()

    def digests(self, seat: Seat) -> list[str]:
        """Nothing was moved."""
        return ["nothing", "nothing"] if seat.sends else ["nothing"]

    def close(self, seat: Seat) -> None:
        """Leave."""
        if seat.sends:
            self._client.close()
        else:
            self._server.stop()


def cases(options: Options) -> list[Case]:
    """One worker behind a server, four small tensors."""
    return [
        Case(
            name="http_round",
            payload=equal_tensors(4, 1024),
            receivers=1,
            ways=[ServerWay(), FourRequests()],
            subject="server",
            references={"four_requests": ("four_requests",)},
            rounds=max(50, options.rounds),
        )
    ]
