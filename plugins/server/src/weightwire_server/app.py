"""An app that has the control routes and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from weightwire.errors import WeightwireError
from weightwire.worker import Worker
from weightwire_server.answers import error_body
from weightwire_server.routes import control_routes


def create_app(worker: Worker, **options: Any) -> Starlette:
    """A Starlette app around one worker; when it is shut down, the worker leaves its trainer.

    Args:
        worker: The worker.
        **options: As for `control_routes`.

    Raises:
        ValueError: The token is empty.
    """

    async def unknown(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        body = error_body(worker, error, status=error.status_code)
        body["error"]["message"] = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(_leave, worker)

    routes = control_routes(worker, **options)
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: unknown})


def _leave(worker: Worker) -> None:
    with suppress(WeightwireError):  # a commit that does not end has to be left to itself
        worker.abort()
        worker.shutdown()
