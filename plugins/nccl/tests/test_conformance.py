from __future__ import annotations

import pytest

from weightwire.testing import TransportConformance, TransportUnderTest


@pytest.mark.thorough
class TestNCCL(TransportConformance):
    @pytest.fixture
    def transport(self) -> TransportUnderTest:
        options = {"packed_buffer_size_bytes": 1 << 18, "packed_num_buffers": 4}
        return TransportUnderTest("nccl", options=options, impatience={"stall_limit": 1.5}, buffer_bytes=1 << 20)
