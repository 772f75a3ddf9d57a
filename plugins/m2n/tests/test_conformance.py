from __future__ import annotations

import pytest

from weightwire.testing import TransportConformance, TransportUnderTest


@pytest.mark.thorough
class TestM2N(TransportConformance):
    @pytest.fixture
    def transport(self) -> TransportUnderTest:
        options = {"buffer_bytes": 1 << 18, "num_buffers": 4, "direct_bytes": 1 << 16}
        return TransportUnderTest("nccl_m2n", options=options, impatience={"stall_limit": 1.5}, buffer_bytes=1 << 20)
