"""The arguments of torch's `rebuild_cuda_tensor`, which stock vLLM sends as handles, checked one by one."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from weightwire.errors import MessageError, MetadataError
from weightwire.layout import dtype_from_name, dtype_name
from weightwire_ipc.storage_handle import StorageHandle, flag, whole

ARGUMENTS: Final = 15
"""How many arguments torch's `rebuild_cuda_tensor` takes."""

_TENSORS: Final = frozenset(("torch.Tensor", "torch.nn.parameter.Parameter"))
_STORAGES: Final = frozenset(("torch.storage.TypedStorage", "torch.storage.UntypedStorage"))


def _lengths(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list):
        raise MessageError(f"{what} must be a tuple of integers, got {type(value).__name__}")
    return tuple(whole(item, f"an element of {what}") for item in value)


@dataclass(frozen=True, slots=True)
class HandleArguments:
    """The arguments of torch's `rebuild_cuda_tensor`, without its choice of classes and `requires_grad`.

    Attributes:
        size: Shape of the tensor.
        stride: Its strides, in elements.
        offset: Where it begins in its storage, in elements.
        dtype: Its dtype.
        device: Index of the exporter's device; the importer puts its own there.
        storage: The storage; None for an empty one.

    Raises:
        MessageError: A field that cannot be, or a tensor that reaches beyond its storage.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: int
    storage: StorageHandle | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _lengths(self.size, "size"))
        object.__setattr__(self, "stride", _lengths(self.stride, "stride"))
        whole(self.offset, "the tensor's offset")
        whole(self.device, "the device index", most=255)
        if len(self.size) != len(self.stride):
            raise MessageError(f"size {self.size} and stride {self.stride} have different lengths")
        if not isinstance(self.dtype, torch.dtype):
            raise MessageError(f"dtype must be a torch.dtype, got {reprlib.repr(self.dtype)}")
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        end = (self.offset + last + 1) * self.dtype.itemsize if self.numel else 0
        held = self.storage.nbytes if self.storage is not None else 0
        if end > held:
            raise MessageError(f"a tensor of {end} bytes does not lie in a storage of {held}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @classmethod
    def parse(cls, arguments: object) -> HandleArguments:
        """Read torch's argument tuple.

        Raises:
            MessageError: It is none; the argument is named.
        """
        if not isinstance(arguments, tuple | list) or len(arguments) != ARGUMENTS:
            raise MessageError(f"a handle must be the {ARGUMENTS} arguments of torch's rebuild_cuda_tensor")
        tensor, size, stride, offset, storage, dtype, device = arguments[:7]
        handle, nbytes, storage_offset, requires_grad, counter, counter_offset, event, sync = arguments[7:]
        for given, allowed in ((tensor, _TENSORS), (storage, _STORAGES)):
            if _named(given) not in allowed:
                raise MessageError(f"a handle names the class {reprlib.repr(given)}, which no tensor of its kind has")
        flag(requires_grad, "requires_grad")
        return cls(
            size,
            stride,
            offset,
            _dtype(dtype),
            device,
            None
            if handle is None
            else StorageHandle(
                handle=handle,
                nbytes=nbytes,
                storage_offset=storage_offset,
                ref_counter_handle=counter,
                ref_counter_offset=counter_offset,
                event_handle=event,
                event_sync_required=sync,
            ),
        )

    def arguments(self, *, device: int | None = None) -> tuple[Any, ...]:
        """Torch's argument tuple, for its plain classes.

        Args:
            device: Index of the device to put there instead of the exporter's.
        """
        handle, nbytes, storage_offset, counter, counter_offset, event, sync = (
            (None, 0, 0, None, 0, None, None) if self.storage is None else self.storage.shared()
        )
        index = self.device if device is None else device
        tensor = (torch.Tensor, torch.Size(self.size), self.stride, self.offset)
        storage = (torch.storage.TypedStorage, self.dtype, index, handle, nbytes, storage_offset)
        return (*tensor, *storage, False, counter, counter_offset, event, sync)

    def to_json(self) -> dict[str, Any]:
        """This as JSON types; `from_json` is the inverse."""
        return {
            "size": list(self.size),
            "stride": list(self.stride),
            "offset": self.offset,
            "dtype": dtype_name(self.dtype),
            "device": self.device,
            "storage": None if self.storage is None else self.storage.to_json(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> HandleArguments:
        """Read what `to_json` wrote.

        Raises:
            MessageError: An impossible field.
        """
        storage = record["storage"]
        return cls(
            record["size"],
            record["stride"],
            record["offset"],
            _dtype(record["dtype"]),
            record["device"],
            None if storage is None else StorageHandle.from_json(storage),
        )


def _named(value: object) -> str:
    """A class by name, or the name that a pickled one was read as."""
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else str(value)


def _dtype(value: object) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    try:
        return dtype_from_name(str(value).removeprefix("torch."))
    except MetadataError as error:
        raise MessageError(f"a handle's dtype: {error.message}") from error


def parse_handles(handles: object) -> list[dict[str, HandleArguments]]:
    """Every handle of a stock message, by GPU uuid; a packed message's one mapping becomes a list of one.

    Raises:
        MessageError: One that cannot be; its place is named.
    """
    mappings: Sequence[Any] = handles if isinstance(handles, list) else [handles]
    return [_parsed(mapping, place) for place, mapping in enumerate(mappings)]


def _parsed(mapping: object, place: int) -> dict[str, HandleArguments]:
    if not isinstance(mapping, dict) or not all(isinstance(uuid, str) for uuid in mapping):
        raise MessageError(f"ipc_handles[{place}] must map GPU uuids to handles, got {type(mapping).__name__}")
    try:
        return {uuid: HandleArguments.parse(arguments) for uuid, arguments in mapping.items()}
    except MessageError as error:
        raise MessageError(f"ipc_handles[{place}]: {error.message}") from error
