"""Worker servers and commands in rank processes of their own."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import nn

from weightwire.layout import dtype_name
from weightwire.testing.pool_process import Rank
from weightwire.testing.pool_rank import at_tidy
from weightwire.worker import Worker
from weightwire_cli import push, status, verify
from weightwire_server import BoundServer, control_routes, create_app

State = dict[str, Any]
COMMANDS = {"push": push.main, "status": status.main, "verify": verify.main}


class Model(nn.Module):
    """A few parameters of two dtypes, and a buffer."""

    def __init__(self, value: float, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.full((4, width), value))
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=index == 1) for index in range(2))
        self.norm = nn.Parameter(torch.full((width,), value, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.full((3,), int(value)))
        with torch.no_grad():
            for layer in self.layers:
                for parameter in layer.parameters():
                    parameter.fill_(value)


def write(path: Path, value: float = 7.0, **options: Any) -> Path:
    """A checkpoint of `Model`."""
    save_file(Model(value, **options).state_dict(), path)
    return path


def serve_worker(state: State, *, port: int = 0, width: int = 16, token: str | None = None, **options: Any) -> str:
    """Serve a fresh `Model` from this rank until the test ends; returns the URL."""
    state["worker"] = Worker(Model(0.0, width), **options)
    server = BoundServer(create_app(state["worker"], token=token), port=port)
    server.start()
    at_tidy(server.stop)
    return server.url


def serve_telling(state: State) -> str:
    """As `serve_worker`, behind an app whose `/weight_info` tells dtypes and shapes to who asks for them."""
    model = Model(0.0)
    worker = state["worker"] = Worker(model)
    buffers = dict(model.named_buffers())

    async def weight_info(request: Request) -> JSONResponse:
        answer = worker.info()
        if request.query_params.get("parameters") == "true":
            answer["parameters"] = {
                "dp0:pp0:pcp0:tp0": {
                    name: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "buffer": name in buffers}
                    for name, tensor in model.state_dict().items()
                }
            }
        return JSONResponse(answer)

    server = BoundServer(Starlette(routes=[Route("/weight_info", weight_info), *control_routes(worker)]))
    server.start()
    at_tidy(server.stop)
    return server.url


def held(state: State) -> dict[str, str]:
    """Checksums of what this rank's worker serves."""
    found: dict[str, str] = state["worker"].checksums()
    return found


def info(state: State) -> dict[str, Any]:
    """What this rank's worker says."""
    found: dict[str, Any] = state["worker"].info()
    return found


def read(state: State) -> None:
    """Hold the weights until `release`."""
    state["hold"] = state["worker"].reading()
    state["hold"].__enter__()


def release(state: State) -> None:
    """Let go of them."""
    state["hold"].__exit__(None, None, None)


def run(state: State, *arguments: str, directory: str = "/", environment: dict[str, str] | None = None) -> Any:
    """Run `weightwire ARGUMENTS` in this rank; returns exit status, standard output and standard error."""
    output, errors = io.StringIO(), io.StringIO()
    os.environ |= environment or {}
    before = os.getcwd()
    os.chdir(directory)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            result = COMMANDS[arguments[0]](list(arguments[1:]))
    finally:
        os.chdir(before)
        for name in environment or {}:
            del os.environ[name]
    return result, output.getvalue(), errors.getvalue()


def run_json(rank: Rank, *arguments: str) -> tuple[int, Any]:
    """As `run`, with `--json`; returns exit status and the record."""
    result, output, errors = rank.call(run, *arguments, "--json")
    assert output, errors
    return result, json.loads(output)
