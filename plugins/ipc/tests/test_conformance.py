from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

from weightwire.testing import TransportConformance, TransportUnderTest
from weightwire_ipc import share


def shared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in shared memory."""
    holder = nn.Module()
    for place, tensor in enumerate(tensors.values()):
        holder.register_buffer(f"tensor_{place}", tensor.clone())
    share(holder)
    return dict(zip(tensors, holder.buffers(), strict=True))


class Ipc(TransportConformance):
    mode: ClassVar[Mapping[str, Any]] = {}
    place: ClassVar[Any] = None

    @pytest.fixture
    def transport(self) -> TransportUnderTest:
        options = {"packed_buffer_size_bytes": 1 << 18, "packed_num_buffers": 4, **self.mode}
        return TransportUnderTest("ipc", options=options, buffer_bytes=1 << 20, place=self.place)


@pytest.mark.thorough
class TestRing(Ipc):
    pass


@pytest.mark.thorough
class TestAdopt(Ipc):
    mode: ClassVar[Mapping[str, Any]] = {"adopt": True}


@pytest.mark.thorough
class TestShared(Ipc):
    place: ClassVar[Any] = staticmethod(shared)
