"""The checks as pytest tests: a transport's whole test file is a subclass and one fixture."""

from __future__ import annotations

import pytest

from weightwire.testing.conformance.catalogue import in_group
from weightwire.testing.conformance.check import Check, Group
from weightwire.testing.conformance.stage import Stage
from weightwire.testing.conformance.subject import TransportUnderTest
from weightwire.testing.fixtures import BorrowRanks


def _each(group: Group) -> pytest.MarkDecorator:
    found = in_group(group)
    return pytest.mark.parametrize("check", found, ids=[check.name for check in found])


class TransportConformance:
    """Subclass it as `Test...`, and give it a fixture `transport` that returns a `TransportUnderTest`.

    Example:
        class TestAcme(TransportConformance):
            @pytest.fixture
            def transport(self, tmp_path: Path) -> TransportUnderTest:
                return TransportUnderTest("acme", options={"directory": str(tmp_path)})
    """

    @pytest.fixture
    def transport(self) -> TransportUnderTest:
        """The transport under test."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `transport`: return a TransportUnderTest")

    @pytest.fixture
    def stage(self, transport: TransportUnderTest, weightwire_ranks: BorrowRanks) -> Stage:
        """What a check works with."""
        return Stage(transport, weightwire_ranks)

    def _run(self, check: Check, stage: Stage, request: pytest.FixtureRequest) -> None:
        reason = check.skipped(stage, everything=request.config.getoption("weightwire_all"))
        if reason:
            pytest.skip(reason)
        check.run(stage)

    @_each("contract")
    def test_contract(self, check: Check, stage: Stage, request: pytest.FixtureRequest) -> None:
        """What can be seen without sending anything."""
        self._run(check, stage, request)

    @_each("bytes")
    def test_bytes(self, check: Check, stage: Stage, request: pytest.FixtureRequest) -> None:
        """Every kind of tensor arrives bit for bit."""
        self._run(check, stage, request)

    @_each("order")
    def test_order(self, check: Check, stage: Stage, request: pytest.FixtureRequest) -> None:
        """Each under its own name."""
        self._run(check, stage, request)

    @_each("versions")
    def test_versions(self, check: Check, stage: Stage, request: pytest.FixtureRequest) -> None:
        """Many updates: partial, skipped, repeated, stale."""
        self._run(check, stage, request)

    @_each("fleet")
    def test_fleet(self, check: Check, stage: Stage, request: pytest.FixtureRequest) -> None:
        """M trainer ranks to N workers."""
        self._run(check, stage, request)

    @_each("failure")
    def test_failure(self, check: Check, stage: Stage, request: pytest.FixtureRequest) -> None:
        """Whoever fails, at whatever point: named, in time, and nothing is lost."""
        self._run(check, stage, request)

    @_each("leak")
    def test_leak(self, check: Check, stage: Stage, request: pytest.FixtureRequest) -> None:
        """Nothing grows, and nothing stays."""
        self._run(check, stage, request)

    @_each("reuse")
    def test_reuse(self, check: Check, stage: Stage, request: pytest.FixtureRequest) -> None:
        """Links opened again and again."""
        self._run(check, stage, request)
