"""A GPU's memory as a link hands it over: storages that parameters lie in, and the ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weightwire.errors import MessageError
from weightwire_ipc.device import DeviceExport, device_uuid, export_storage, open_export


class DeviceSegment:
    """A storage of this process on a GPU; each importer gets an export of its own.

    Args:
        storage: Not empty.

    Attributes:
        nbytes: Its size.
        start: Its address on the GPU.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.nbytes, self.start = storage.nbytes(), storage.data_ptr()
        self._storage = storage
        self._exports: list[DeviceExport] = []

    def hand_over(self) -> tuple[dict[str, Any], list[int]]:
        """What to tell one worker of it."""
        export = export_storage(self._storage)
        self._exports.append(export)
        return {"device": export.to_json()}, []


def storages_of(tensors: Sequence[torch.Tensor]) -> list[DeviceSegment]:
    """The storages that `tensors` lie in, each once, in the order of their addresses' first use."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.nbytes}
    return [DeviceSegment(storage) for storage in found.values()]


class DeviceMapping:
    """Another process's memory on this process's GPU, imported once.

    Args:
        record: What the sender says of it.
        device: This process's device.
        pid: The sender, as the system knows it.

    Raises:
        MessageError: A record that describes no export.
        Unsupported: It is on another GPU, of another process, or cannot be opened.
    """

    lent = False

    def __init__(self, record: dict[str, Any], device: torch.device, pid: int) -> None:
        if device.type != "cuda":
            raise MessageError(f"GPU memory was handed to a worker on {device}", transport="ipc")
        export = DeviceExport.from_json(record)
        uuid = device_uuid(device)
        self._memory = open_export(export, device=device, expected_uuid=uuid, expected_pid=pid)
        self.nbytes = export.nbytes

    def window(self) -> torch.Tensor:
        """All of it, 1-D uint8."""
        return self._memory
