from __future__ import annotations

from collections.abc import Iterator

import pytest

from plugins.server.tests.fleet import FleetScene, Switch, rank_servers
from plugins.server.tests.scene import Scene
from weightwire.testing.fixtures import pool, ranks
from weightwire_server import BoundServer
from weightwire_server.private_directory import PrivateDirectory

__all__ = ["pool", "ranks"]


@pytest.fixture(scope="session")
def switch() -> Iterator[tuple[Switch, str]]:
    switched = Switch()
    with BoundServer(switched) as server:
        yield switched, server.url


@pytest.fixture(scope="session")
def rank_switches() -> Iterator[tuple[PrivateDirectory, list[Switch]]]:
    directory = PrivateDirectory.fresh()
    with rank_servers(directory) as switches:
        yield directory, switches
    directory.remove()


@pytest.fixture
def scene(switch: tuple[Switch, str]) -> Iterator[Scene]:
    switched, url = switch
    with Scene(url, lambda app: setattr(switched, "app", app), lambda: switched.active) as made:
        yield made


@pytest.fixture
def fleet(switch: tuple[Switch, str], rank_switches: tuple[PrivateDirectory, list[Switch]]) -> Iterator[FleetScene]:
    switched, url = switch
    with FleetScene(url, switched, *rank_switches) as made:
        yield made


@pytest.fixture(params=["scene", "fleet"], ids=["one", "several"])
def either(request: pytest.FixtureRequest) -> Scene:
    """One rank, or a front of several: their answers are the same."""
    made: Scene = request.getfixturevalue(request.param)
    return made
