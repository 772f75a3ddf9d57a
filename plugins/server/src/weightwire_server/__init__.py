"""A worker server: the weight routes of vLLM's RL API around a PyTorch module, alone or inside an app of yours.

    Starlette(routes=[Route("/generate", generate), *control_routes(worker)])   # your app, your server
    serve(Worker(model), port=8000)                                             # nothing else to serve

The public names are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightwire_server.app import create_app as create_app
    from weightwire_server.routes import control_routes as control_routes
    from weightwire_server.serving import BoundServer as BoundServer
    from weightwire_server.serving import serve as serve

_MODULES = {"BoundServer": "serving", "control_routes": "routes", "create_app": "app", "serve": "serving"}

__all__ = ["BoundServer", "control_routes", "create_app", "serve"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
