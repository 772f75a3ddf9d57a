"""A CRC-32 of everything that moves in a round, so that two sides can prove that the same bytes did."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch

from weightwire.errors import TransferError


class Checksums:
    """CRC-32 by number: of a parameter or of a chunk, as the transport counts. Computes nothing unless enabled.

    Args:
        enabled: Whether to compute any.

    Attributes:
        values: What was noted; travels as JSON.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.values: dict[str, int] = {}

    def add(self, number: int, buffers: Sequence[torch.Tensor]) -> None:
        """Note the checksum of `number`; `buffers` are 1-D uint8 and count as one."""
        if not self.enabled:
            return
        value = 0
        for data in (buffer.cpu() for buffer in buffers):
            # The bytes where they are; a detour over numpy would make it a requirement.
            view = (ctypes.c_char * data.numel()).from_address(data.data_ptr()) if data.numel() else b""
            value = zlib.crc32(view, value)
        self.values[str(number)] = value

    def compare(self, sent: Mapping[str, int], names: Callable[[int], Sequence[str]], *, transport: str) -> None:
        """Compare with what a sender noted.

        Args:
            sent: Its `values`.
            names: The parameters behind a number.
            transport: Backend name.

        Raises:
            TransferError: Other bytes arrived; their parameters are named.
        """
        for number, value in sent.items():
            if self.values.get(number) != value:
                found = names(int(number))
                raise TransferError(
                    f"the bytes of {', '.join(found[:3])}{' and others' if found[3:] else ''} changed on the way: "
                    "the checksum differs",
                    transport=transport,
                    parameter=found[0],
                )
