"""One export of one storage of CUDA memory, checked field by field before CUDA or torch sees it.

Torch trusts these numbers: a wrong offset makes it read, and a wrong counter write, memory that is not meant.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

from weightwire.errors import MessageError

LARGEST: Final = 1 << 48
"""Bytes and elements beyond this are no GPU's."""
COUNTERS: Final = 10_000
"""Reference counters in one of torch's files of them."""

CUDA_HANDLE_BYTES: Final = 64
"""Size of a CUDA IPC handle of memory or of an event."""
_HEADER_BYTES: Final = 2
_SEGMENTED_BYTES: Final = 1 << 20
_COUNTER_FILE: Final = re.compile(rb"/torch_([0-9]{1,10})_[0-9]{1,20}_[0-9]{1,20}")


def whole(value: object, what: str, *, least: int = 0, most: int = LARGEST) -> int:
    """`value` as an integer in `[least, most]`; a bool is none.

    Raises:
        MessageError: It is not; `what` names it.
    """
    if type(value) is not int or not least <= value <= most:
        raise MessageError(f"{what} must be an integer between {least} and {most}, got {reprlib.repr(value)}")
    return value


def flag(value: object, what: str) -> bool:
    """`value` as a bool.

    Raises:
        MessageError: It is none; `what` names it.
    """
    if type(value) is not bool:
        raise MessageError(f"{what} must be true or false, got {reprlib.repr(value)}")
    return value


def _sized(value: object, what: str, size: int) -> None:
    if type(value) is not bytes or len(value) != size:
        found = f"{len(value)}" if isinstance(value, bytes) else type(value).__name__
        raise MessageError(f"{what} must be {size} bytes, got {found}")


def _check_memory_handle(value: object) -> None:
    """Plain, or after torch's version and kind: `c` one allocation, `e` an expandable segment of many."""
    if type(value) is bytes:
        size, kind = len(value), value[1:_HEADER_BYTES]
        if size == CUDA_HANDLE_BYTES or (kind == b"c" and size == _HEADER_BYTES + CUDA_HANDLE_BYTES):
            return
        if kind == b"e" and _HEADER_BYTES < size <= _SEGMENTED_BYTES:
            return
    found = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
    raise MessageError(f"handle is no CUDA memory handle of torch's: got {found}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageHandle:
    """One export of one storage, as torch's `_share_cuda_` gives it. One import releases it.

    Attributes:
        handle: Names the CUDA allocation; 64 bytes, in newer torch after two that tell its kind.
        nbytes: Size of the storage.
        storage_offset: Where it begins in the allocation, in bytes.
        ref_counter_handle: Name of the shared memory that holds the export's reference counter.
        ref_counter_offset: Which counter there.
        event_handle: CUDA event after which the memory is written; 64 bytes.
        event_sync_required: Whether the importer waits for it.

    Raises:
        MessageError: A field that cannot be; it is named.
    """

    _BYTES: ClassVar[tuple[str, ...]] = ("handle", "ref_counter_handle", "event_handle")

    handle: bytes = field(repr=False)
    nbytes: int
    storage_offset: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes = field(repr=False)
    event_sync_required: bool

    def __post_init__(self) -> None:
        _check_memory_handle(self.handle)
        whole(self.nbytes, "nbytes", least=1)
        whole(self.storage_offset, "storage_offset", most=LARGEST - self.nbytes)
        # torch opens the file of this name and subtracts from the counter at this place without looking.
        name = self.ref_counter_handle
        if type(name) is not bytes or _COUNTER_FILE.fullmatch(name) is None:
            raise MessageError(f"ref_counter_handle names none of torch's counter files: {reprlib.repr(name)}")
        whole(self.ref_counter_offset, "ref_counter_offset", most=COUNTERS - 1)
        _sized(self.event_handle, "event_handle", CUDA_HANDLE_BYTES)
        flag(self.event_sync_required, "event_sync_required")

    @property
    def exporter(self) -> int:
        """Process id of the exporter, as it sees itself."""
        named = _COUNTER_FILE.fullmatch(self.ref_counter_handle)
        assert named is not None
        return int(named[1])

    def shared(self) -> tuple[Any, ...]:
        """As torch's `_new_shared_cuda` takes it, after the device."""
        return (
            self.handle,
            self.nbytes,
            self.storage_offset,
            self.ref_counter_handle,
            self.ref_counter_offset,
            self.event_handle,
            self.event_sync_required,
        )

    def to_json(self) -> dict[str, Any]:
        """This as JSON types, bytes in base64; `from_json` is the inverse."""
        record = {name: getattr(self, name) for name in _fields(type(self))}
        return record | {name: base64.b64encode(record[name]).decode() for name in self._BYTES}

    @classmethod
    def from_json(cls, record: object) -> Self:
        """Read what `to_json` wrote.

        Raises:
            MessageError: Unknown, missing or impossible fields; the first is named.
        """
        if not isinstance(record, Mapping):
            raise MessageError(f"an export must be an object, got {type(record).__name__}")
        names = _fields(cls)
        complaints = [f"unknown key {key!r}" for key in sorted(map(str, record.keys() - set(names)))]
        complaints += [f"missing key {key!r}" for key in names if key not in record]
        if complaints:
            raise MessageError(f"an export has {', '.join(complaints[:5])}")
        decoded = {name: _decoded(record[name], name) for name in cls._BYTES}
        return cls(**{**record, **decoded})


def _fields(cls: type[StorageHandle]) -> list[str]:
    return [spec.name for spec in dataclasses.fields(cls) if not spec.metadata.get("local")]


def _decoded(value: object, what: str) -> bytes:
    if not isinstance(value, str):
        raise MessageError(f"{what} must be a string of base64, got {type(value).__name__}")
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise MessageError(f"{what} is not standard base64") from error
