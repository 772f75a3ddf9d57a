"""Parameters that live in shared memory: workers read them where they are, without a copy on the trainer's side."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weightwire.dtensor import is_dtensor
from weightwire.errors import Unsupported
from weightwire.staging import ALIGNMENT, storage_bytes, view_like
from weightwire_ipc.memory import MemoryFile


class SharedSegment:
    """A memory file that tensors of this process live in; it stays while one of them does.

    Attributes:
        fd: Its descriptor.
        nbytes: Its size.
        start: Address at which it is mapped here.
    """

    def __init__(self, file: MemoryFile) -> None:
        self.fd, self.nbytes, self.start = file.fd, file.nbytes, file.memory.data_ptr()
        self._file = file
        weakref.finalize(file.mapping, _forget, weakref.ref(self)).atexit = False
        # Only the tensors keep it mapped.
        del file.mapping, file.memory

    def hand_over(self, pid: int) -> tuple[dict[str, Any], list[int]]:
        """What to tell the worker of process `pid` of it, and the descriptor to go with that."""
        return {"memory": self.nbytes}, [self.fd]


_segments: list[SharedSegment] = []


def _forget(reference: weakref.ref[SharedSegment]) -> None:
    segment = reference()
    if segment is not None:
        _segments.remove(segment)
        segment._file.close()


def segments() -> list[SharedSegment]:
    """All that tensors of this process live in now."""
    return list(_segments)


def share(module: nn.Module) -> int:
    """Move every parameter and buffer of `module` into shared memory, once; it trains and serves on as before.

    The tensor objects stay the same, with their strides and with what shares storage still sharing it, so optimizers,
    hooks and tied weights see no difference; an optimizer's state is not moved. Workers that are sent the module then
    copy it from there. What is there already stays. Views of old storage held elsewhere keep the old memory.

    Returns:
        Bytes that were moved.

    Raises:
        Unsupported: A tensor is not in ordinary CPU memory: on a device, a DTensor, or shared by `share_memory_()`.
        TransferError: There is not enough memory; nothing was moved.
    """
    tensors: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    known = segments()
    moving: dict[int, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        _require_plain(name, tensor)
        start = tensor.untyped_storage().data_ptr()
        if tensor.untyped_storage().nbytes() and not any(one.start <= start < one.start + one.nbytes for one in known):
            moving.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    sizes = [group[0].untyped_storage().nbytes() for group in moving.values()]
    if not sizes:
        return 0
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    file = MemoryFile(offsets[-1], what="sharing a module")
    for group, offset, size in zip(moving.values(), offsets, sizes, strict=False):
        _move(group, torch.frombuffer(file.mapping, dtype=torch.uint8, offset=offset, count=size).untyped_storage())
    _segments.append(SharedSegment(file))
    return sum(sizes)


def _require_plain(name: str, tensor: torch.Tensor) -> None:
    if is_dtensor(tensor):
        raise Unsupported(f"{name!r} is a DTensor: its pieces are gathered anyway, so sharing them would save no copy")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise Unsupported(f"{name!r} is a {tensor.layout} tensor on {tensor.device}: only plain CPU memory is shared")
    if tensor.untyped_storage().is_shared():
        raise Unsupported(f"{name!r} is shared with other processes by share_memory_(): undo that first")


def _move(tensors: Sequence[torch.Tensor], storage: torch.UntypedStorage) -> None:
    with torch.inference_mode(False), torch.no_grad():
        storage_bytes(storage).copy_(storage_bytes(tensors[0].untyped_storage()))
    for tensor in tensors:
        # One of inference mode stays one: it would be neither else, and most operations would refuse it.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.data = view_like(tensor, storage)
