"""A weightwire worker in a Ray actor: one rank of a server."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from weightwire.deadline import Deadline
from weightwire.errors import MessageError, Unsupported, describe
from weightwire.messages import ParallelConfig
from weightwire_rdt.cluster import answer_of

METHODS: Final = frozenset(
    {"abort", "checksums", "finish", "info", "init", "pause", "reset", "resume", "set_weight_version"}
    | {"shutdown", "start", "update"}
)
"""Methods of a `Worker` that its callers may call."""
UNBOUNDED: Final = frozenset({"info", "resume", "set_weight_version"})
"""Those of them that take no deadline, since they never wait for long."""
CONCURRENCY: Final[Mapping[str, Any]] = {"max_concurrency": 16, "concurrency_groups": {"control": 8}}
"""Ray's options for the actor: abort, info and pause have threads of their own, and find one while others are busy."""


class WorkerActor:
    """Hosts a `Worker`. `RayWorkerGroup.start` makes actors of it; `RayWorkerGroup` drives them.

    Arguments, answers and errors are JSON types. Derive from it for methods of your own, such as one that answers
    with the model: `with self.worker.reading(): ...`.

    Args:
        build: `"module:function"`, which the actor's process can import; `function(parallel, device, **arguments)`
            returns the model of one rank.
        arguments: JSON.
        parallel: Fields of the rank's `ParallelConfig`.
        device: Where the model is to be; None takes the GPU that Ray gave the actor, else the CPU.
        options: Keywords of `Worker`.

    Attributes:
        worker: The worker.
        model: What `build` made.

    Raises:
        MessageError: There is no such function.
    """

    def __init__(
        self,
        build: str,
        arguments: dict[str, Any] | None = None,
        *,
        parallel: dict[str, Any] | None = None,
        device: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        function = function_named(build)
        config = ParallelConfig.parse(parallel or {}, what="parallel")
        import ray
        import torch

        from weightwire.worker import Worker

        where = torch.device(device or ("cuda" if ray.get_gpu_ids() else "cpu"))
        self.model = function(config, where, **(arguments or {}))
        self.worker = Worker(self.model, parallel_config=config, **(options or {}))

    def call(
        self, method: str, arguments: list[Any], keywords: dict[str, Any], timeout: float | None
    ) -> dict[str, Any]:
        """Call the worker.

        Args:
            method: One of `METHODS`.
            arguments: Its arguments.
            keywords: Its keywords.
            timeout: Its deadline in seconds, for those that take one.

        Returns:
            `{"value": what it returned}` or `{"error": what it raised}`.
        """
        try:
            if method not in METHODS:
                raise Unsupported(f"a worker has no method {method!r}")
            limit = {} if timeout is None or method in UNBOUNDED else {"deadline": Deadline(timeout, what=method)}
            return {"value": getattr(self.worker, method)(*arguments, **keywords, **limit)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is told
            return answer_of(describe(error))


def function_named(reference: str) -> Callable[..., Any]:
    """The function that `"module:function"` names.

    Raises:
        MessageError: There is none.
    """
    module, colon, name = reference.partition(":")
    if not (module and colon and name):
        raise MessageError(f"the model's builder must be named as 'module:function', got {reference!r}")
    try:
        function = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise MessageError(f"{reference!r}: this process finds no module {error.name!r}") from error
    except AttributeError as error:
        raise MessageError(f"{reference!r}: {error}") from error
    if not callable(function):
        raise MessageError(f"{reference!r} is no function")
    return cast(Callable[..., Any], function)
