from __future__ import annotations

import pytest

from weightwire.testing import TransportConformance, TransportUnderTest


class Ipc(TransportConformance):
    options: dict[str, object] = {}

    @pytest.fixture
    def transport(self) -> TransportUnderTest:
        options = {"packed_buffer_size_bytes": 1 << 18, "packed_num_buffers": 4, **self.options}
        return TransportUnderTest("ipc", options=options, buffer_bytes=1 << 20)


@pytest.mark.thorough
class TestRing(Ipc):
    pass


@pytest.mark.thorough
class TestAdopt(Ipc):
    options = {"adopt": True}
