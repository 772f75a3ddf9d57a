"""What one sender changed, as one buffer: header, table of groups, coded addresses, values.

Every section starts at a multiple of 8 bytes, and numbers are little-endian. A reader trusts nothing: what it allocates
is bounded by the buffer and the address space, and every address and length is checked before anyone sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightwire_sparse import compression as values_compression
from weightwire_sparse import rice
from weightwire_sparse.changes import Bytes, Changes
from weightwire_sparse.pieces import AddressSpace, Integers
from weightwire_sparse.rice import choose, warm

__all__ = ["Payload", "build", "choose", "read", "warm"]

_MAGIC = int.from_bytes(b"wwsparse", "little")
_VERSION = 1
_ZSTD = 1  # flag: values are byte planes in one zstd frame

HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("flags", "<u4"),
        ("sender", "<u8"),  # whose address space
        ("numel", "<u8"),  # how large it is
        ("addresses", "<u8"),  # how many changed
        ("groups", "<u8"),  # entries of the table
        ("words", "<u8"),  # 64-bit words of coded addresses
        ("values", "<u8"),  # bytes of the last section, without what fills it up to a multiple of 8
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A delta ready to send.

    Attributes:
        buffer: All of its bytes.
        saved: How many there would be more without compression.
    """

    buffer: Bytes
    saved: int


def build(
    changes: Changes,
    space: AddressSpace,
    *,
    kernels: str,
    compression: str = "none",
    threads: int = 1,
    out: Callable[[int], memoryview | Bytes] = lambda nbytes: np.empty(nbytes, np.uint8),
) -> Payload:
    """Pack changes into one buffer; values are copied once, into it.

    Args:
        changes: None at all are packed too, into 64 bytes.
        space: Where they are.
        kernels: What `rice.choose` answered.
        compression: `"none"` or `"zstd"`, which is used where it saves at least 2 % of the values.
        threads: For coding addresses.
        out: Gives the buffer, once its size in bytes is known; allocated by default.

    Raises:
        MessageError: An unknown compression, or zstandard is not installed.
    """
    values_compression.check(compression)
    blocks = _blocks(changes.addresses, space)
    assert len(changes.values) == sum(nbytes for _, nbytes in blocks)
    coded = rice.encode(changes.addresses, kernels=kernels, threads=threads)
    frame = values_compression.compress(changes.values, blocks) if compression == "zstd" else None
    values = changes.values if frame is None else np.frombuffer(frame, np.uint8)
    ends = _ends(len(coded.table), coded.words, len(values))
    buffer = np.asarray(out(ends[-1]))
    assert buffer.dtype == np.uint8 and buffer.shape == (ends[-1],)
    fields = (space.sender, space.numel, len(changes.addresses), len(coded.table), coded.words, len(values))
    buffer[: ends[0]].view(HEADER)[0] = (_MAGIC, _VERSION, 0 if frame is None else _ZSTD, *fields)
    buffer[ends[0] : ends[1]] = coded.table.view(np.uint8)
    np.concatenate((*coded.groups, np.zeros(0, np.uint64)), out=buffer[ends[1] : ends[2]].view(np.uint64))
    buffer[ends[2] : ends[2] + len(values)] = values
    buffer[ends[2] + len(values) :] = 0
    return Payload(buffer, _filled(len(changes.values)) - _filled(len(values)))


def read(
    buffer: Bytes,
    space: AddressSpace,
    *,
    kernels: str,
    threads: int = 1,
    room: Callable[[int], Integers] = lambda count: np.empty(count, np.int64),
) -> Changes:
    """The changes in a buffer; values that are not compressed lie in the buffer itself.

    Args:
        buffer: uint8, a whole payload and nothing else.
        space: The sender's.
        kernels: What `rice.choose` answered.
        threads: For decoding addresses.
        room: Gives memory for so many addresses, int64; new memory by default.

    Raises:
        UpdateRefused: It is not what `build` makes of changes in this space.
        MessageError: It is compressed, and zstandard is not installed.
    """
    if buffer.ctypes.data % 8 or not buffer.flags.c_contiguous:
        buffer = buffer.copy()
    flags, count, groups, words, nbytes = _read_header(buffer, space)
    ends = _ends(groups, words, nbytes)
    if ends[-1] != len(buffer):
        raise rice.malformed(f"its sections are {ends[-1]} bytes, and {len(buffer)} came")
    if not flags & _ZSTD and nbytes < count * int(space.widths.min(initial=16)):
        raise rice.malformed(f"{nbytes} bytes are too few for the values of {count} addresses")
    table = buffer[ends[0] : ends[1]].view(rice.ENTRY)
    if int(table["count"].sum(dtype=np.int64)) != count:
        raise rice.malformed(f"its table has more or fewer than {count} addresses")
    coded = buffer[ends[1] : ends[2]].view(np.uint64)
    addresses = rice.decode(table, coded, limit=space.numel, kernels=kernels, threads=threads, room=room)
    blocks = _blocks(addresses, space)
    values = buffer[ends[2] : ends[2] + nbytes]
    if flags & _ZSTD:
        values = values_compression.decompress(values, blocks)
    elif nbytes != (needed := sum(size for _, size in blocks)):
        raise rice.malformed(f"it has {nbytes} bytes of values, and its addresses need {needed}")
    return Changes(addresses, values)


def _read_header(buffer: Bytes, space: AddressSpace) -> tuple[int, int, int, int, int]:
    """Flags, addresses, groups, words, bytes of values: as Python's integers, so that nothing wraps."""
    if len(buffer) < HEADER.itemsize:
        raise rice.malformed(f"{len(buffer)} bytes are fewer than its header has")
    magic, version, flags, sender, numel, count, groups, words, nbytes = (
        int(field) for field in buffer[: HEADER.itemsize].view(HEADER)[0].item()
    )
    if (magic, version) != (_MAGIC, _VERSION) or flags & ~_ZSTD:
        raise rice.malformed(f"it does not begin as version {_VERSION} does")
    if (sender, numel) != (space.sender, space.numel):
        expected = f"{space.numel} elements of trainer rank {space.sender}"
        raise rice.malformed(f"it is about {numel} elements of trainer rank {sender}, not {expected}")
    if count > numel or groups != -(-count // rice.GROUP):
        raise rice.malformed(f"it has {count} addresses of {numel} in {groups} groups")
    return flags, count, groups, words, nbytes


def _ends(groups: int, words: int, nbytes: int) -> list[int]:
    """Where header, table, words and values end."""
    ends = [HEADER.itemsize]
    for size in (groups * rice.ENTRY.itemsize, words * 8, _filled(nbytes)):
        ends.append(ends[-1] + size)
    return ends


def _filled(nbytes: int) -> int:
    """The next multiple of 8."""
    return -(-nbytes // 8) * 8


def _blocks(addresses: Integers, space: AddressSpace) -> list[tuple[int, int]]:
    """Bytes per element and bytes of all elements of that width, in the order of the addresses: wide ones first."""
    nbytes = space.counts(addresses) * space.widths
    return [(int(width), int(nbytes[space.widths == width].sum())) for width in np.unique(space.widths)[::-1]]
