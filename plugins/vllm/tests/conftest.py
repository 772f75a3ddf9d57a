"""One vLLM server at a time, started when a test first asks for its kind; the trainer's models; trainers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from torch import nn

from plugins.vllm.tests.scene import START_SECONDS, Server, TinyModel, tiny_model, trainer_for
from weightwire.errors import WeightwireError
from weightwire.source import WeightSource
from weightwire.testing.fixtures import borrowing, pool, ranks
from weightwire.testing.pool import Rank, RankPool

__all__ = ["pool", "ranks"]

TWO_RANKS: Final = ("--tensor-parallel-size", "2")


@dataclass(frozen=True, slots=True)
class Models:
    """Two sets of weights of one shape.

    Attributes:
        old: Those that servers are started with.
        new: Others.
    """

    old: TinyModel
    new: TinyModel


class Lineup:
    """The server that runs now; asking for another kind ends it first, so that there is only one.

    Args:
        logs: Folder for their output.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._kind: object = None
        self._server: Server | None = None

    def get(self, folder: Path, *arguments: str, **environment: str) -> Server:
        """A healthy server of this kind."""
        kind = (folder, arguments, environment)
        if self._server is None or self._kind != kind or not self._server.healthy():
            self.stop()
            log = self._logs / "server.log"
            self._server, self._kind = Server(folder, log, *arguments, environment=environment), kind
            self._server.wait_until_healthy()
        return self._server

    def stop(self) -> None:
        """End the one that runs."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()


@pytest.fixture(scope="session")
def lineup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lineup]:
    """The servers, one at a time."""
    lineup = Lineup(tmp_path_factory.mktemp("logs"))
    yield lineup
    lineup.stop()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The trainer's models, whose greedy tokens differ."""
    old, new = (tiny_model(tmp_path_factory.mktemp("model"), seed) for seed in (1, 2))
    assert old.greedy() != new.greedy()
    return Models(old, new)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give servers the time to start, and run the tests of one server together."""
    here = Path(__file__).parent
    mine = [item for item in items if item.path.is_relative_to(here)]
    for item in mine:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(START_SECONDS + 60))
    if len(mine) == len(items):
        items.sort(key=lambda item: "server" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="module")
def process(pool: RankPool, request: pytest.FixtureRequest) -> Iterator[Rank]:
    """One rank for all tests of a module: it takes long to import vLLM."""
    for borrow in borrowing(pool, request.node.nodeid, strict=False):
        yield borrow(1)[0]


Connect = Callable[..., Any]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """`connect(client, weights, backend="nccl", **info)`: a trainer engine of this process, shut down afterwards."""
    engines: list[Any] = []

    def connect(client: Any, weights: nn.Module | WeightSource, backend: str = "nccl", **info: Any) -> Any:
        engines.append(trainer_for(client, weights, backend, **info))
        return engines[-1]

    yield connect
    for engine in engines:
        # Its server may be one that was killed.
        with contextlib.suppress(WeightwireError):
            engine.shutdown()


@pytest.fixture
def server(lineup: Lineup, models: Models) -> Server:
    """A server with one worker, on the old weights, labelled "old"."""
    return with_old_weights(lineup.get(models.old.folder), models)


@pytest.fixture
def two_ranks(lineup: Lineup, models: Models) -> Server:
    """The same with two workers that share each parameter."""
    server = lineup.get(models.old.folder, *TWO_RANKS, VLLM_CPU_OMP_THREADS_BIND="0|1")
    return with_old_weights(server, models)


def with_old_weights(server: Server, models: Models) -> Server:
    """Push the old weights, whatever the last test left."""
    trainer = trainer_for(server.client, models.old.module, "nccl", takeover=True)
    trainer.send_weights(weight_version="old")
    trainer.shutdown()
    assert server.greedy() == models.old.greedy()
    return server
