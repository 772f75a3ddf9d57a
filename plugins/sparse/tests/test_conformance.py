from __future__ import annotations

import pytest

from weightwire.testing import TransportConformance, TransportUnderTest


@pytest.mark.thorough
class TestSparse(TransportConformance):
    @pytest.fixture
    def transport(self) -> TransportUnderTest:
        options = {"packed_buffer_size_bytes": 1 << 18, "packed_num_buffers": 4}
        return TransportUnderTest("sparse_nccl", options=options, impatience={"stall_limit": 1.5}, buffer_bytes=1 << 20)


@pytest.mark.thorough
class TestDeltas(TransportConformance):
    """The kit's versions have nothing in common: pieces travel whole in rounds that are deltas all the same."""

    @pytest.fixture
    def transport(self) -> TransportUnderTest:
        options = {"packed_buffer_size_bytes": 1 << 18, "dense_above": 9.0, "verify_every": 1}
        return TransportUnderTest("sparse_nccl", options=options, impatience={"stall_limit": 1.5}, buffer_bytes=1 << 20)
