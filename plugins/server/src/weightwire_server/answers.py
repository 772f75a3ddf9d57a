"""What a failed call is answered with: always the same body, its status by the kind of error."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import JSONResponse

from weightwire.errors import WeightwireError
from weightwire_server.hosting import Host

logger = logging.getLogger("weightwire.server")


async def error_body(host: Host, error: BaseException, *, status: int) -> dict[str, Any]:
    """The body of an error answer; `type` is the class that a client of weightwire raises it as again.

    Args:
        host: Its state, label and revision are told, so that a caller knows where it stands.
        error: What went wrong.
        status: HTTP status that it is sent with.
    """
    known = await host.info()
    record: dict[str, Any] = {"message": str(error), "type": type(error).__name__, "param": None, "code": status}
    if isinstance(error, WeightwireError):
        record |= error.to_json()
    elif status == 500:
        record["message"] = f"{type(error).__name__}: {error}"
    return {
        "error": record,
        "state": known["state"],
        "weight_version": known["weight_version"],
        "revision": known["revision"],
        "update_id": known["update_id"],
        "rank": known["rank"],
    }


async def error_answer(host: Host, error: Exception, *, path: str) -> JSONResponse:
    """The answer to a call that raised; an error that is not weightwire's is a bug, 500, and logged with its trace."""
    if isinstance(error, WeightwireError):
        status = error.status
    else:
        status = 500
        logger.error("%s failed", path, exc_info=error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(await error_body(host, error, status=status), status_code=status, headers=headers)
