from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from plugins.server.tests.scene import Scene
from weightwire.testing.fixtures import pool, ranks
from weightwire_server import BoundServer

__all__ = ["pool", "ranks"]


class _Switch:
    """One server for all tests, which takes a second to start and stop; each test puts its app in."""

    app: ASGIApp
    active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # What tests ask in between does not count: its answer arrives before it is over here.
        counted = scope.get("path") != "/weight_info"
        self.active += counted
        try:
            await self.app(scope, receive, send)
        finally:
            self.active -= counted


@pytest.fixture(scope="session")
def switch() -> Iterator[tuple[_Switch, str]]:
    switched = _Switch()
    with BoundServer(switched, lifespan="off") as server:
        yield switched, server.url


@pytest.fixture
def scene(switch: tuple[_Switch, str]) -> Iterator[Scene]:
    switched, url = switch
    with Scene(url, lambda app: setattr(switched, "app", app), lambda: switched.active) as made:
        yield made
