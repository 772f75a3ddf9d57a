"""Length-prefixed JSON: four bytes of length, big-endian, then one JSON object."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from weightwire.errors import PayloadTooLarge

Frame: TypeAlias = dict[str, Any]
"""One JSON object; its key `"type"` says what it is."""

MAX_FRAME: Final = 64 << 20
"""The longest frame, in bytes of JSON."""

_LENGTH: Final = struct.Struct(">I")


class FrameError(ValueError):
    """Bytes that are no frame, or announce a frame over the limit."""


def encode(frame: Mapping[str, Any]) -> bytes:
    """`frame` as it travels.

    Raises:
        PayloadTooLarge: It is longer than `MAX_FRAME`.
        TypeError: It holds something that is not a JSON type.
    """
    body = json.dumps(frame, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise PayloadTooLarge(f"a message of {len(body) >> 20} MiB, over the {MAX_FRAME >> 20} MiB a message may have")
    return _LENGTH.pack(len(body)) + body


def decode(data: bytes) -> Frame:
    """The frame that `encode` wrote."""
    return _parse(memoryview(data)[_LENGTH.size :].tobytes())


class Decoder:
    """Cuts a stream into frames.

    Attributes:
        limit: The longest frame accepted, in bytes; small until the sender has said who it is.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add what was read, yield what is complete.

        Raises:
            FrameError: The stream is not made of frames, or one is over the limit.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > self.limit:
                raise FrameError(f"a frame of {size} bytes where {self.limit} are allowed")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            body = self._buffer[_LENGTH.size : end]
            del self._buffer[:end]
            yield _parse(body)


def _parse(body: bytes | bytearray) -> Frame:
    try:
        frame = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame that is not JSON ({error})") from None
    if not isinstance(frame, dict):
        raise FrameError("a frame that is not a JSON object")
    return frame
