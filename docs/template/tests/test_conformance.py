"""The conformance kit: the same tests that every transport passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightwire.testing import TransportConformance, TransportUnderTest


class TestDisk(TransportConformance):
    """Small files, so that a model takes several."""

    @pytest.fixture
    def transport(self, tmp_path: Path) -> TransportUnderTest:
        return TransportUnderTest("disk", options={"root": str(tmp_path), "shard_bytes": 1 << 16}, buffer_bytes=1 << 16)
