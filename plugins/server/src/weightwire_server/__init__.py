"""A worker server: the weight routes of vLLM's RL API around a PyTorch module, alone or inside an app of yours.

    Starlette(routes=[Route("/generate", generate), *control_routes(worker)])   # your app, your server
    serve(Worker(model), port=8000)                                             # nothing else to serve
    launch(make_model, Listening(port=8000), workers=2)                         # in two processes

The public names are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightwire_server.app import create_app as create_app
    from weightwire_server.front import Front as Front
    from weightwire_server.launching import Listening as Listening
    from weightwire_server.launching import launch as launch
    from weightwire_server.routes import control_routes as control_routes
    from weightwire_server.serving import BoundServer as BoundServer
    from weightwire_server.serving import serve as serve

_MODULES = {
    "BoundServer": "serving",
    "Front": "front",
    "Listening": "launching",
    "control_routes": "routes",
    "create_app": "app",
    "launch": "launching",
    "serve": "serving",
}

__all__ = ["BoundServer", "Front", "Listening", "control_routes", "create_app", "launch", "serve"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
