"""The pytest plugin of weightwire's test kit: an option, and rank processes for tests.

pytest imports it in every run, so that it imports neither weightwire nor torch until a fixture is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

_SUITE = os.path.join("conformance", "suite.py")

if TYPE_CHECKING:
    from weightwire.testing.fixtures import BorrowRanks
    from weightwire.testing.pool import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--weightwire-all`."""
    parser.getgroup("weightwire").addoption(
        "--weightwire-all",
        action="store_true",
        dest="weightwire_all",
        help="run the expensive checks of weightwire's conformance kit too",
    )


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the conformance kit skipped, and why."""
    skipped: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        place = report.longrepr
        if isinstance(place, tuple) and str(place[0]).endswith(_SUITE):
            reason = str(place[2]).removeprefix("Skipped: ")
            skipped[reason] = skipped.get(reason, 0) + 1
    if skipped:
        terminalreporter.section("weightwire conformance: skipped")
        for reason, count in skipped.items():
            terminalreporter.write_line(f"{count} x {reason}")


@pytest.fixture(scope="session")
def weightwire_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """The pool of rank processes of the whole session."""
    from weightwire.testing import fixtures

    yield from fixtures.session_pool(request.config)


@pytest.fixture
def weightwire_ranks(weightwire_pool: RankPool, request: pytest.FixtureRequest) -> Iterator[BorrowRanks]:
    """`weightwire_ranks(n)` lends n clean rank processes until the test ends."""
    from weightwire.testing import fixtures

    yield from fixtures.borrowing(weightwire_pool, request.node.nodeid, strict=False)


@pytest.fixture
def weightwire_strict_ranks(weightwire_pool: RankPool, request: pytest.FixtureRequest) -> Iterator[BorrowRanks]:
    """As `weightwire_ranks`, and the test fails if it leaves threads, descriptors or running calls in them."""
    from weightwire.testing import fixtures

    yield from fixtures.borrowing(weightwire_pool, request.node.nodeid, strict=True)
