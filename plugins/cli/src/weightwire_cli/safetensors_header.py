"""The header of a safetensors file, believed only as far as the file bears it out.

A file is 8 bytes with the header's length (little-endian), the header in JSON, and the data that it describes:

    {"__metadata__": {...}, "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any, Final

from weightwire.errors import MetadataError

_LENGTH_BYTES: Final = 8
_LONGEST_HEADER: Final = 100_000_000
"""The limit of the format's own reader."""
_MOST_DIMENSIONS: Final = 64
_LARGEST: Final = (1 << 63) - 1
_KEYS: Final = {"dtype", "shape", "data_offsets"}

DTYPES: Final[dict[str, tuple[str, int]]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
"""The format's name of a dtype -> torch's, and bytes of an element. Types of less than a byte are not offered."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        name: Its name.
        dtype: torch's name of its dtype.
        shape: Its shape.
        start: Where its bytes begin in the file.
        stop: Where they end.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(descriptor: int, *, path: str) -> tuple[StoredTensor, ...]:
    """Read and check the header of an open file.

    Args:
        descriptor: Descriptor of the file.
        path: Its name in errors.

    Returns:
        The tensors in the order of their bytes.

    Raises:
        MetadataError: The header is none, or contradicts itself or the file; file and tensor are named.
        OSError: The file cannot be read.
    """
    size = os.fstat(descriptor).st_size
    if size < _LENGTH_BYTES:
        raise MetadataError(f"{path} is no safetensors file: it has {size} bytes")
    length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    if length > _LONGEST_HEADER:
        raise MetadataError(f"{path} is no safetensors file: a header has {_LONGEST_HEADER:,} bytes at most")
    if length > size - _LENGTH_BYTES:
        raise MetadataError(f"{path} is truncated: a header of {length} bytes in a file of {size}")
    record = _parsed(os.pread(descriptor, length, _LENGTH_BYTES), path)
    record.pop("__metadata__", None)
    first = _LENGTH_BYTES + length
    found = [_stored(name, entry, first, path) for name, entry in record.items()]
    found.sort(key=lambda tensor: (tensor.start, tensor.stop))
    _check_covering(found, first, size, path)
    return tuple(found)


def _parsed(raw: bytes, path: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in record if names.count(name) > 1)
            raise MetadataError(f"{path} names {twice!r} twice", parameter=twice)
        return record

    try:
        record = json.loads(raw, object_pairs_hook=unique)
    except MetadataError:
        raise
    except (ValueError, RecursionError) as error:
        raise MetadataError(f"{path} is no safetensors file: its header is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise MetadataError(f"{path} is no safetensors file: its header is no object")
    return record


def _stored(name: str, entry: object, first: int, path: str) -> StoredTensor:
    def refused(problem: str) -> MetadataError:
        return MetadataError(f"{path}: tensor {name!r} {problem}", parameter=name)

    if not name:
        raise refused("has no name")
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise refused(f"is not described by {', '.join(sorted(_KEYS))} alone")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise refused(f"has dtype {str(dtype)[:40]!r}, which cannot be sent; these can: {', '.join(DTYPES)}")
    if not _naturals(shape) or len(shape) > _MOST_DIMENSIONS:
        raise refused(f"has a shape that is none: {str(shape)[:80]}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refused(f"has data_offsets that are none: {str(offsets)[:80]}")
    torch_dtype, itemsize = DTYPES[dtype]
    nbytes, needed = offsets[1] - offsets[0], math.prod(shape) * itemsize
    if nbytes != needed:
        raise refused(f"is {dtype} of shape {tuple(shape)}, which takes {needed} bytes, and has {nbytes}")
    return StoredTensor(name, torch_dtype, tuple(shape), first + offsets[0], first + offsets[1])


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _LARGEST for value in values)


def _check_covering(tensors: list[StoredTensor], first: int, size: int, path: str) -> None:
    """The format asks that tensors cover the data without gap or overlap: so a file cannot be cut or padded unseen."""
    reached = first
    for tensor in tensors:
        if tensor.start != reached:
            kind = "overlaps the one before it" if tensor.start < reached else "leaves a gap before it"
            raise MetadataError(
                f"{path}: tensor {tensor.name!r} {kind}: it begins at byte {tensor.start - first} of the data, where "
                f"{reached - first} is next",
                parameter=tensor.name,
            )
        if tensor.stop > size:
            raise MetadataError(
                f"{path} is truncated: tensor {tensor.name!r} ends at byte {tensor.stop} of a file of {size}",
                parameter=tensor.name,
            )
        reached = tensor.stop
    if reached != size:
        raise MetadataError(f"{path} has {size - reached} bytes after its last tensor: it is not what it says")
