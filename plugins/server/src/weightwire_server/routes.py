"""The control routes: vLLM's paths, bodies and answers, and what weightwire adds to them.

    POST /init_weight_transfer_engine      {"init_info": {...}}              GET /weight_info
    POST /start_weight_update                                                GET /is_paused
    POST /start_draft_weight_update                                          GET /get_world_size?include_dp=
    POST /update_weights                   {"update_info": {...} or [...]}   GET /health
    POST /finish_weight_update             {"weight_version": "..."} or none GET /metrics
    POST /abort_weight_update              POST /pause?mode=abort|wait|keep
    POST /shutdown_weight_transfer_engine  POST /resume
    POST /update_weight_version            {"new_version": "..."}
    POST /weight_checker                   {"action": "checksum"|"reset"|"compare", "baseline": {...}}

The six calls that may wait for a trainer run in threads of their own, those that may wait for readers or for a
running update in others, and the rest answer at once: so control calls answer while a transfer runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_args

from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weightwire.deadline import DEFAULT_SECONDS, Deadline
from weightwire.errors import MessageError, PeerLost
from weightwire.gate import PauseMode
from weightwire.messages import pick_update
from weightwire.worker import ABORT_SECONDS, Worker
from weightwire_server.access import BearerToken
from weightwire_server.answers import error_answer
from weightwire_server.call_threads import CallThreads
from weightwire_server.callers import Callers
from weightwire_server.checksums import keyed, mismatches
from weightwire_server.inbound import Inbound
from weightwire_server.metrics import CONTENT_TYPE, OperationMetrics

DEFAULT_BODY_LIMIT = 64 << 20
"""Largest body taken, in bytes: the metadata of some 500,000 parameters."""

_CALLS_AT_ONCE = 16

T = TypeVar("T")
Answer = dict[str, Any] | Response
Handler = Callable[[Inbound], Awaitable[Answer]]


def control_routes(
    worker: Worker,
    *,
    token: str | None = None,
    timeout: float = DEFAULT_SECONDS,
    body_limit: int = DEFAULT_BODY_LIMIT,
    registry: CollectorRegistry | None = None,
) -> list[Route]:
    """Routes to put into a Starlette or FastAPI app, at its root or under a `Mount`.

    The first route that matches a path wins: list your own before these where both have one (`/health`, say).

    Args:
        worker: The worker that these routes drive.
        token: Bearer token that every route but `/health` asks for; None admits everybody who can connect.
        timeout: Longest that a call may take, in seconds; a client may ask for less with `Weightwire-Timeout`.
        body_limit: Largest body taken, in bytes.
        registry: Where metrics are registered; None makes a registry of their own.

    Raises:
        ValueError: The token is empty.
    """
    control = _Control(worker, token=token, timeout=timeout, body_limit=body_limit, registry=registry)
    return [control.route(*entry) for entry in control.table()]


class _Control:
    """The handlers, and what they share."""

    def __init__(
        self,
        worker: Worker,
        *,
        token: str | None,
        timeout: float,
        body_limit: int,
        registry: CollectorRegistry | None,
    ) -> None:
        self._worker = worker
        self._token = BearerToken(token)
        self._timeout = timeout
        self._body_limit = body_limit
        self._metrics = OperationMetrics(registry)
        self._callers = Callers()
        self._engine_threads = CallThreads("engine", limit=_CALLS_AT_ONCE)
        self._control_threads = CallThreads("control", limit=_CALLS_AT_ONCE)

    def table(self) -> list[tuple[str, str, Handler, float]]:
        """Method, path, handler, and the seconds its call may take."""
        short = min(ABORT_SECONDS, self._timeout)
        return [
            ("POST", "/init_weight_transfer_engine", self._init, self._timeout),
            ("POST", "/start_weight_update", self._start, self._timeout),
            ("POST", "/start_draft_weight_update", self._start_draft, self._timeout),
            ("POST", "/update_weights", self._update, self._timeout),
            ("POST", "/finish_weight_update", self._finish, self._timeout),
            ("POST", "/abort_weight_update", self._abort, short),
            ("POST", "/shutdown_weight_transfer_engine", self._shutdown, short),
            ("POST", "/pause", self._pause, self._timeout),
            ("POST", "/resume", self._resume, self._timeout),
            ("POST", "/update_weight_version", self._update_weight_version, short),
            ("POST", "/weight_checker", self._weight_checker, self._timeout),
            ("GET", "/weight_info", self._weight_info, self._timeout),
            ("GET", "/is_paused", self._is_paused, self._timeout),
            ("GET", "/get_world_size", self._get_world_size, self._timeout),
            ("GET", "/health", self._health, self._timeout),
            ("GET", "/metrics", self._scraped, self._timeout),
        ]

    def route(self, method: str, path: str, handler: Handler, seconds: float) -> Route:
        """A Starlette route around one handler: admission, reading, the error body."""

        async def endpoint(request: Request) -> Response:
            try:
                if path != "/health":
                    self._token.check(request.headers.get("authorization"))
                answer = await handler(Inbound(request, seconds=seconds, body_limit=self._body_limit))
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets its words
                return error_answer(self._worker, error, path=path)
            return JSONResponse(answer) if isinstance(answer, dict) else answer

        return Route(path, endpoint, methods=[method], name=f"weightwire{path.replace('/', ':')}")

    # The trainer's calls

    async def _init(self, inbound: Inbound) -> Answer:
        info = (await inbound.fields(init_info=(dict, "required")))["init_info"]
        with self._callers.waiting(inbound.request, inbound.deadline, key=None):
            await self._engine(inbound, "init", lambda until: self._worker.init(info, deadline=until))
        return {"message": "Weight transfer initialized"}

    async def _start(self, inbound: Inbound) -> Answer:
        await self._begin(inbound, "start", draft=False)
        return {"message": "Weight update started"}

    async def _start_draft(self, inbound: Inbound) -> Answer:
        await self._begin(inbound, "start_draft", draft=True)
        return {"message": "Draft weight update started"}

    async def _begin(self, inbound: Inbound, operation: str, *, draft: bool) -> None:
        update_id = inbound.update_id
        await self._engine(
            inbound,
            operation,
            lambda until: self._worker.start(update_id=update_id, draft=draft, deadline=until),
        )

    async def _update(self, inbound: Inbound) -> Answer:
        payload = (await inbound.fields(update_info=((dict, list), "required")))["update_info"]
        parallel = self._worker.parallel_config
        index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        mine = pick_update(payload, index=index, count=self._worker.world_size)
        update_id, sequence = inbound.update_id, inbound.sequence
        key = None if update_id is None or sequence is None else (update_id, sequence)
        with self._callers.waiting(inbound.request, inbound.deadline, key=key):
            await self._engine(
                inbound,
                "update",
                lambda until: self._worker.update(mine, update_id=update_id, sequence=sequence, deadline=until),
            )
        return {"message": "Weights updated"}

    async def _finish(self, inbound: Inbound) -> Answer:
        label = (await inbound.fields(weight_version=(str, "optional")))["weight_version"]
        update_id = inbound.update_id
        await self._engine(
            inbound, "finish", lambda until: self._worker.finish(label, update_id=update_id, deadline=until)
        )
        return {"message": "Weight update finished"}

    async def _shutdown(self, inbound: Inbound) -> Answer:
        await self._engine(inbound, "shutdown", lambda until: self._worker.shutdown(deadline=until))
        return {"message": "Weight transfer shut down"}

    async def _abort(self, inbound: Inbound) -> Answer:
        update_id = inbound.update_id
        await self._aside(lambda: self._worker.abort(update_id=update_id, deadline=inbound.deadline))
        return {"message": "Weight update aborted"}

    # The operator's calls

    async def _pause(self, inbound: Inbound) -> Answer:
        mode = inbound.choice("mode", get_args(PauseMode), default="abort")
        inbound.flag("clear_cache", True)  # there is no cache here; a wrong value is refused all the same
        await self._aside(lambda: self._worker.pause(mode, deadline=inbound.deadline))
        return {"status": "paused"}

    async def _resume(self, inbound: Inbound) -> Answer:
        self._worker.resume()
        return {"status": "resumed"}

    async def _update_weight_version(self, inbound: Inbound) -> Answer:
        label = (await inbound.fields(new_version=(str, "required")))["new_version"]
        await self._aside(lambda: self._worker.set_weight_version(label))
        return {"success": True, "new_version": label}

    async def _weight_checker(self, inbound: Inbound) -> Answer:
        body = await inbound.fields(action=(str, "required"), baseline=(dict, "optional"))
        action, baseline = body["action"], body["baseline"]
        if action == "reset":
            await self._aside(lambda: self._worker.reset(deadline=inbound.deadline))
            return {"status": "reset"}
        if action not in ("checksum", "compare"):
            raise MessageError(f"action is checksum, reset or compare, not {action!r}", parameter="action")
        if action == "compare" and baseline is None:
            raise MessageError("compare needs a baseline: what checksum answered before", parameter="baseline")
        sums = await self._aside(lambda: self._worker.checksums(deadline=inbound.deadline))
        found = keyed(sums, self._worker.parallel_config)
        if action == "checksum":
            return {"checksums": found}
        differing = mismatches(found, baseline)
        return {"match": not differing, "mismatches": differing}

    async def _weight_info(self, inbound: Inbound) -> Answer:
        return self._worker.info()

    async def _is_paused(self, inbound: Inbound) -> Answer:
        return {"is_paused": self._worker.is_paused}

    async def _get_world_size(self, inbound: Inbound) -> Answer:
        across = inbound.flag("include_dp", True)
        return {"world_size": self._worker.world_size if across else self._worker.parallel_config.world_size}

    async def _health(self, inbound: Inbound) -> Answer:
        async with self._worker.gate.reading(ignore_pause=True, deadline=inbound.deadline):
            return {"status": "ok"}

    async def _scraped(self, inbound: Inbound) -> Answer:
        return Response(self._metrics.page(), media_type=CONTENT_TYPE)

    # Threads

    async def _aside(self, call: Callable[[], T]) -> T:
        return await self._control_threads.submit(call)

    async def _engine(self, inbound: Inbound, operation: str, call: Callable[[Deadline], T]) -> T:
        """Run one of the engine's calls; when the server is stopped meanwhile, its deadline is cancelled."""
        deadline = inbound.deadline
        with self._metrics.measured(operation):
            running = self._engine_threads.submit(lambda: call(deadline))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                deadline.cancel(PeerLost(f"the server was stopped during {inbound.what}"))
                return await running  # the call ends with these words, and they still reach the client
