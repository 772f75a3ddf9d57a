"""A GPU's memory as a link hands it over: storages that parameters lie in, and the ring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weightwire.errors import MessageError
from weightwire_ipc.device import (
    DeviceExport,
    device_uuid,
    disown_export,
    export_storage,
    open_export,
    release_exports,
)


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
        self._exports: list[tuple[DeviceExport, int]] = []

    def hand_over(self, pid: int) -> tuple[dict[str, Any], list[int]]:
        """What to tell the worker of process `pid` of it."""
        export = export_storage(self._storage)
        self._exports.append((export, pid))
        return {"device": export.to_json()}, []

    def close(self) -> None:
        """Release all exports; of one whose importer was killed, torch would wait for ever for the importer's word."""
        while self._exports:
            export, pid = self._exports.pop()
            if not _alive(pid):
                disown_export(export)
        release_exports()


def storages_of(tensors: Sequence[torch.Tensor]) -> list[DeviceSegment]:
    """The storages that `tensors` lie in, each once, in the order of their addresses' first use."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.nbytes}
    return [DeviceSegment(storage) for storage in found.values()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


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
