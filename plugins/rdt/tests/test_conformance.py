from __future__ import annotations

import pytest

from plugins.rdt.tests.cluster import Cluster
from weightwire.testing import TransportConformance, TransportUnderTest


@pytest.mark.thorough
class TestRDT(TransportConformance):
    @pytest.fixture
    def transport(self, cluster: Cluster) -> TransportUnderTest:
        options = {"buffer_bytes": 1 << 18, "num_rdt_buffers": 4, "direct_bytes": 1 << 16}
        return TransportUnderTest(
            "sharded_rdt",
            options=options,
            buffer_bytes=1 << 20,
            join=cluster.joining(),
            foreign_threads=("grpc_global_tim",),
        )
