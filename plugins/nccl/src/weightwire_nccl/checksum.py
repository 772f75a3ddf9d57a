"""A CRC-32 of every chunk of a round, so that two sides can prove that the same bytes moved."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence

import torch

from weightwire.errors import TransferError
from weightwire.layout import ParamMeta
from weightwire.packing import Chunk


class ChunkChecksums:
    """CRC-32 by place of the chunk in the plan; computes nothing unless `enabled`."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.values: dict[str, int] = {}

    def add(self, place: int, buffers: Sequence[torch.Tensor]) -> None:
        """Note the checksum of chunk `place`; `buffers` are 1-D uint8."""
        if not self._enabled:
            return
        value = 0
        for data in (buffer.cpu() for buffer in buffers):
            # The bytes where they are; a detour over numpy would make it a requirement.
            view = (ctypes.c_char * data.numel()).from_address(data.data_ptr()) if data.numel() else b""
            value = zlib.crc32(view, value)
        self.values[str(place)] = value

    def compare(self, sent: dict[str, int], chunks: Sequence[Chunk], metadata: Sequence[ParamMeta]) -> None:
        """Compare with what a sender noted.

        Raises:
            TransferError: A chunk arrived with other bytes; its parameters are named.
        """
        for place, value in sent.items():
            if self.values.get(place) != value:
                names = [metadata[item.index].name for item in chunks[int(place)].items]
                raise TransferError(
                    f"the bytes of {', '.join(names[:3])}{' and others' if names[3:] else ''} changed on the way: "
                    "the checksum differs",
                    transport="nccl",
                    parameter=names[0],
                )
