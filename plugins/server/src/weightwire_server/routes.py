"""The control routes: vLLM's paths, bodies and answers, and what weightwire adds to them.

    POST /init_weight_transfer_engine      {"init_info": {...}}              GET /weight_info?parameters=
    POST /start_weight_update                                                GET /is_paused
    POST /start_draft_weight_update                                          GET /get_world_size?include_dp=
    POST /update_weights                   {"update_info": {...} or [...]}   GET /health
    POST /finish_weight_update             {"weight_version": "..."} or none GET /metrics
    POST /abort_weight_update              POST /pause?mode=abort|wait|keep
    POST /shutdown_weight_transfer_engine  POST /resume
    POST /abort_requests                   {"request_ids": [...]} or none
    POST /update_weight_version            {"new_version": "..."}
    POST /weight_checker                   {"action": "checksum"|"reset"|"compare", "baseline": {...}}

What they drive is a `Host`: one rank in this process, or a front of several. No call blocks the event loop, so
control calls answer while a transfer runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weightwire.deadline import DEFAULT_SECONDS
from weightwire.errors import MessageError, Unsupported
from weightwire.gate import PauseMode
from weightwire_server.access import BearerToken
from weightwire_server.answers import error_answer
from weightwire_server.callers import Callers
from weightwire_server.checksums import mismatches
from weightwire_server.hosting import Host, as_host
from weightwire_server.inbound import Inbound
from weightwire_server.metrics import CONTENT_TYPE, OperationMetrics

if TYPE_CHECKING:
    from weightwire.worker import Worker

DEFAULT_BODY_LIMIT = 64 << 20
"""Largest body taken, in bytes: the metadata of some 500,000 parameters."""

_SHORT_SECONDS = 10.0
"""For what waits for no trainer and no reader."""

AbortRequests = Callable[[list[str] | None], Awaitable[int]]
"""Aborts the app's requests of these ids, all of them if None, and returns how many there were."""

Answer = dict[str, Any] | Response
Handler = Callable[[Inbound], Awaitable[Answer]]


def control_routes(
    served: Worker | Host,
    *,
    token: str | None = None,
    timeout: float = DEFAULT_SECONDS,
    body_limit: int = DEFAULT_BODY_LIMIT,
    registry: CollectorRegistry | None = None,
    abort_requests: AbortRequests | None = None,
) -> list[Route]:
    """Routes to put into a Starlette or FastAPI app, at its root or under a `Mount`.

    The first route that matches a path wins: list your own before these where both have one (`/health`, say).

    Args:
        served: The worker that these routes drive, or the front of several.
        token: Bearer token that every route but `/health` asks for; None admits everybody who can connect.
        timeout: Longest that a call may take, in seconds; a client may ask for less with `Weightwire-Timeout`.
        body_limit: Largest body taken, in bytes.
        registry: Where metrics are registered; None makes a registry of their own.
        abort_requests: Ends the app's own requests; without it `/abort_requests` answers 501.

    Raises:
        ValueError: The token is empty.
    """
    control = _Control(
        as_host(served),
        token=token,
        timeout=timeout,
        body_limit=body_limit,
        registry=registry,
        abort_requests=abort_requests,
    )
    return [control.route(*entry) for entry in control.table()]


class _Control:
    """The handlers, and what they share."""

    def __init__(
        self,
        host: Host,
        *,
        token: str | None,
        timeout: float,
        body_limit: int,
        registry: CollectorRegistry | None,
        abort_requests: AbortRequests | None,
    ) -> None:
        self._host = host
        self._token = BearerToken(token)
        self._timeout = timeout
        self._body_limit = body_limit
        self._metrics = OperationMetrics(registry)
        self._callers = Callers()
        self._abort_app_requests = abort_requests

    def table(self) -> list[tuple[str, str, Handler, float]]:
        """Method, path, handler, and the seconds its call may take."""
        short = min(_SHORT_SECONDS, self._timeout)
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
            ("POST", "/abort_requests", self._abort_requests, short),
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
                return await error_answer(self._host, error, path=path)
            return JSONResponse(answer) if isinstance(answer, dict) else answer

        return Route(path, endpoint, methods=[method], name=f"weightwire{path.replace('/', ':')}")

    # The trainer's calls

    async def _init(self, inbound: Inbound) -> Answer:
        info = (await inbound.fields(init_info=(dict, "required")))["init_info"]
        with self._callers.waiting(inbound.request, inbound.deadline, key=None), self._metrics.measured("init"):
            await self._host.init(info, inbound.deadline)
        return {"message": "Weight transfer initialized"}

    async def _start(self, inbound: Inbound) -> Answer:
        with self._metrics.measured("start"):
            await self._host.start(inbound.update_id, inbound.deadline, draft=False)
        return {"message": "Weight update started"}

    async def _start_draft(self, inbound: Inbound) -> Answer:
        with self._metrics.measured("start_draft"):
            await self._host.start(inbound.update_id, inbound.deadline, draft=True)
        return {"message": "Draft weight update started"}

    async def _update(self, inbound: Inbound) -> Answer:
        payload = (await inbound.fields(update_info=((dict, list), "required")))["update_info"]
        update_id, sequence = inbound.update_id, inbound.sequence
        key = None if update_id is None or sequence is None else (update_id, sequence)
        with self._callers.waiting(inbound.request, inbound.deadline, key=key), self._metrics.measured("update"):
            await self._host.update(payload, update_id, sequence, inbound.deadline)
        return {"message": "Weights updated"}

    async def _finish(self, inbound: Inbound) -> Answer:
        label = (await inbound.fields(weight_version=(str, "optional")))["weight_version"]
        with self._metrics.measured("finish"):
            await self._host.finish(label, inbound.update_id, inbound.deadline)
        return {"message": "Weight update finished"}

    async def _shutdown(self, inbound: Inbound) -> Answer:
        with self._metrics.measured("shutdown"):
            await self._host.shutdown(inbound.deadline)
        return {"message": "Weight transfer shut down"}

    async def _abort(self, inbound: Inbound) -> Answer:
        await self._host.abort(inbound.update_id, inbound.deadline)
        return {"message": "Weight update aborted"}

    # The operator's calls

    async def _pause(self, inbound: Inbound) -> Answer:
        mode: PauseMode = inbound.choice("mode", get_args(PauseMode), default="abort")
        inbound.flag("clear_cache", True)  # there is no cache here; a wrong value is refused all the same
        await self._host.pause(mode, inbound.deadline)
        return {"status": "paused"}

    async def _resume(self, inbound: Inbound) -> Answer:
        await self._host.resume()
        return {"status": "resumed"}

    async def _abort_requests(self, inbound: Inbound) -> Answer:
        ids = (await inbound.fields(request_ids=(list, "optional")))["request_ids"]
        if ids is not None and not all(isinstance(one, str) for one in ids):
            raise MessageError("request_ids must be strings", parameter="request_ids")
        if self._abort_app_requests is None:
            raise Unsupported("this server has no requests to abort: pass abort_requests to control_routes")
        return {"status": "aborted", "aborted": await self._abort_app_requests(ids or None)}

    async def _update_weight_version(self, inbound: Inbound) -> Answer:
        label = (await inbound.fields(new_version=(str, "required")))["new_version"]
        await self._host.set_weight_version(label, inbound.deadline)
        return {"success": True, "new_version": label}

    async def _weight_checker(self, inbound: Inbound) -> Answer:
        body = await inbound.fields(action=(str, "required"), baseline=(dict, "optional"))
        action, baseline = body["action"], body["baseline"]
        if action == "reset":
            await self._host.reset(inbound.deadline)
            return {"status": "reset"}
        if action not in ("checksum", "compare"):
            raise MessageError(f"action is checksum, reset or compare, not {action!r}", parameter="action")
        if action == "compare" and baseline is None:
            raise MessageError("compare needs a baseline: what checksum answered before", parameter="baseline")
        found = await self._host.checksums(inbound.deadline)
        if action == "checksum":
            return {"checksums": found}
        differing = mismatches(found, baseline)
        return {"match": not differing, "mismatches": differing}

    async def _weight_info(self, inbound: Inbound) -> Answer:
        info = await self._host.info()
        if inbound.flag("parameters", False) and (held := await self._host.inventory(inbound.deadline)):
            info["parameters"] = held
        return info

    async def _is_paused(self, inbound: Inbound) -> Answer:
        return {"is_paused": self._host.is_paused}

    async def _get_world_size(self, inbound: Inbound) -> Answer:
        return {"world_size": self._host.world_size(across_dp=inbound.flag("include_dp", True))}

    async def _health(self, inbound: Inbound) -> Answer:
        await self._host.check(inbound.deadline)
        return {"status": "ok"}

    async def _scraped(self, inbound: Inbound) -> Answer:
        return Response(self._metrics.page(), media_type=CONTENT_TYPE)
