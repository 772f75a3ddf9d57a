"""Memory of a GPU, exported to other processes of the host through CUDA IPC and told of in typed JSON.

An export lives as long as its `DeviceExport` and until its one importer has let go of it. Importing twice, or an
export for two importers, breaks torch's count: make one export for each importer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils.dlpack import from_dlpack

from weightwire.errors import MessageError, Unsupported
from weightwire_ipc.storage_handle import CUDA_HANDLE_BYTES, StorageHandle, whole

_INSTEAD: Final = "use memory='host', or backend 'nccl'"
_COUNTER_BYTES: Final = 8
_COUNTERS_START: Final = 64
"""torch keeps a header of so many bytes in front of the counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceExport(StorageHandle):
    """One export of one storage, seen as flat bytes, with whose it is.

    Attributes:
        device_uuid: The GPU.
        pid: The exporter.
        dtype: Always `"uint8"`.
        keeper: In the exporting process: what keeps the memory while the importer is on its way.

    Raises:
        MessageError: A field that cannot be; it is named.
    """

    device_uuid: str
    pid: int
    dtype: str = "uint8"
    keeper: torch.Tensor | None = field(default=None, repr=False, compare=False, metadata={"local": True})

    def __post_init__(self) -> None:
        StorageHandle.__post_init__(self)
        uuid = self.device_uuid
        if not isinstance(uuid, str) or not 0 < len(uuid) <= 64 or not uuid.isascii() or not uuid.isprintable():
            raise MessageError("device_uuid must be a GPU's uuid, as torch spells it")
        whole(self.pid, "pid", least=1, most=(1 << 31) - 1)
        if self.pid != self.exporter:
            raise MessageError(f"pid {self.pid} exports a counter of process {self.exporter}")
        if self.dtype != "uint8":
            raise MessageError(f"dtype must be 'uint8', got {self.dtype!r}")


def device_uuid(device: torch.device | int) -> str:
    """The GPU's uuid, as stock vLLM spells it too."""
    return str(torch.cuda.get_device_properties(device).uuid)


def share_storage(storage: torch.UntypedStorage) -> tuple[StorageHandle, torch.Tensor]:
    """Export a storage on a GPU for one importer.

    Args:
        storage: Not empty, and allocated by this process.

    Returns:
        The export, and what keeps it: drop it when the importer is done.
    """
    # torch wraps the exported storage once more for every export and unwraps it when it dies. So that a parameter
    # which is exported in each round does not grow, another storage over the same memory is.
    keeper = from_dlpack(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    told = keeper.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    _, handle, nbytes, offset, counter, counter_offset, event, sync = told
    shared = StorageHandle(
        handle=handle,
        nbytes=nbytes,
        storage_offset=offset,
        ref_counter_handle=counter,
        ref_counter_offset=counter_offset,
        event_handle=event,
        event_sync_required=sync,
    )
    return shared, keeper


def export_storage(storage: torch.UntypedStorage) -> DeviceExport:
    """Export a storage on a GPU for one importer, who sees it as flat bytes.

    The export ends when what is returned is dropped and the importer has let go. The importer's stream waits for what
    is on this device's current stream now, and for nothing later: synchronise before saying that more is there.

    Args:
        storage: Not empty, and allocated by this process.
    """
    shared, keeper = share_storage(storage)
    fields: dict[str, Any] = {name: getattr(shared, name) for name in StorageHandle.__dataclass_fields__}
    return DeviceExport(**fields, device_uuid=device_uuid(storage.device), pid=os.getpid(), keeper=keeper)


def open_export(export: DeviceExport, *, device: torch.device, expected_uuid: str, expected_pid: int) -> torch.Tensor:
    """Import an export, once; dropping the tensor and all views of it lets go.

    Args:
        export: What the peer sent.
        device: This process's device.
        expected_uuid: Its `device_uuid`.
        expected_pid: The peer's process, as the system knows it.

    Returns:
        A 1-D uint8 tensor over the exporter's memory.

    Raises:
        Unsupported: Another GPU or process than expected, or memory that cannot be opened here.
    """
    if export.device_uuid != expected_uuid:
        raise Unsupported(
            f"the trainer's memory is on GPU {export.device_uuid} and this worker on GPU {expected_uuid}: CUDA IPC "
            f"needs one GPU; {_INSTEAD}"
        )
    if export.pid != expected_pid:
        raise Unsupported(
            f"the export is of process {export.pid} and came from process {expected_pid}: trainer and worker do not "
            f"see the same processes (another pid namespace?); {_INSTEAD}"
        )
    if export.pid == os.getpid():
        raise Unsupported(f"trainer and worker are one process, and CUDA IPC is between processes; {_INSTEAD}")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        storage = torch.UntypedStorage._new_shared_cuda(index, *export.shared())
    except RuntimeError as error:
        raise cannot_open(export, error) from error
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)


def cannot_open(export: StorageHandle, error: RuntimeError) -> Unsupported:
    """What to say when torch cannot import an export."""
    if export.exporter == os.getpid():
        why = "if trainer and worker are one process, run them as two"
    elif export.handle[1:2] == b"e" and len(export.handle) != CUDA_HANDLE_BYTES:
        why = "unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the trainer"
    else:
        why = "trainer and worker must see one /dev/shm and torch releases of one kind"
    return Unsupported(
        f"GPU memory of process {export.exporter} cannot be opened: {error}; {why}, or {_INSTEAD}", transport="ipc"
    )


def release_exports() -> None:
    """Free the memory of exports that were dropped and whose importers have let go since."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def disown_export(export: StorageHandle) -> None:
    """Release one's own export whose importer is dead: it cannot let go any more, and its memory would stay for ever.

    Drop the export afterwards.
    """
    assert export.exporter == os.getpid(), "only the exporter gives an export up"
    if counted(export) == 1:
        torch.UntypedStorage._release_ipc_counter(export.ref_counter_handle, export.ref_counter_offset)  # type: ignore[no-untyped-call]


def counted(export: StorageHandle) -> int:
    """The export's reference counter: 1 until its importer has let go; 0 when that or torch's file is gone."""
    try:
        with open(f"/dev/shm{export.ref_counter_handle.decode('ascii')}", "rb") as counters:
            counters.seek(_COUNTERS_START + _COUNTER_BYTES * export.ref_counter_offset)
            return int.from_bytes(counters.read(_COUNTER_BYTES), "little", signed=True)
    except FileNotFoundError:
        return 0
