"""An app that has the control routes, and leaves the trainer when it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute

from weightwire_server.answers import error_body
from weightwire_server.hosting import Host, as_host
from weightwire_server.routes import control_routes

if TYPE_CHECKING:
    from weightwire.worker import Worker


def create_app(served: Worker | Host, *, routes: Sequence[BaseRoute] = (), **options: Any) -> Starlette:
    """A Starlette app around one worker or a front; when it is shut down, the trainer is left.

    Args:
        served: The worker, or the front of several.
        routes: Routes of yours, which come first.
        **options: As for `control_routes`.

    Raises:
        ValueError: The token is empty.
    """
    host = as_host(served)

    async def unknown(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        body = await error_body(host, error, status=error.status_code)
        body["error"]["message"] = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await host.opened()
        try:
            yield
        finally:
            await host.closed()

    every = [*routes, *control_routes(host, **options)]
    return Starlette(routes=every, lifespan=lifespan, exception_handlers={HTTPException: unknown})
