"""What a stock vLLM trainer's messages bring to a worker: CUDA IPC handles of torch's, for each GPU its own.

A packed round is several messages, each telling of its own parameters, and a sink wants to know of all before the
first. If the model tells what it holds, that is what a packed round brings. If it does not (it loads by itself), or if
it could be brought in more than one way (tied, cast or ignored names, buffers), the fills are kept until the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from weightwire.errors import MessageError, Unsupported
from weightwire.layout import ParamMeta, dtype_from_name, total_bytes
from weightwire.sink import UpdateSpec, WeightSink
from weightwire.stock_packing import unpack
from weightwire_ipc.device import cannot_open, device_uuid
from weightwire_ipc.handles import HandleArguments, parse_handles
from weightwire_ipc.messages import IPCWeightTransferUpdateInfo

Pairs = list[tuple[str, torch.Tensor]]


def stock_metadata(update_info: IPCWeightTransferUpdateInfo) -> tuple[ParamMeta, ...]:
    """The parameters that a stock message names.

    Raises:
        MetadataError: A dtype or shape that cannot be.
    """
    named = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
    return tuple(ParamMeta(name, dtype_from_name(dtype), tuple(shape)) for name, dtype, shape in named)


def refuse_without_gpu(device: torch.device) -> None:
    """A stock trainer exports a GPU's memory only.

    Raises:
        Unsupported: `device` is none.
    """
    if device.type != "cuda":
        raise Unsupported(
            "the message has no key 'weightwire', so it is a stock vLLM trainer's, which sends CUDA IPC handles, and "
            f"this worker's model is on {device}: use weightwire's trainer engine, which also takes host memory",
            transport="ipc",
        )


def own_handles(handles: Any, uuid: str) -> list[HandleArguments]:
    """The handles for the GPU `uuid`, each checked, before any is opened.

    Raises:
        MessageError: There is none for it, or one that cannot be.
    """
    found = []
    for place, mapping in enumerate(parse_handles(handles)):
        if uuid not in mapping:
            theirs = ", ".join(sorted(mapping)) or "none"
            raise MessageError(
                f"IPC handle not found for GPU UUID {uuid} in ipc_handles[{place}], which is for {theirs}: trainer and "
                "worker must share a GPU; use backend 'nccl' otherwise",
                transport="ipc",
            )
        found.append(mapping[uuid])
    return found


class StockReception:
    """The receiving side of one worker engine, for stock messages.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._imported: tuple[HandleArguments, torch.Tensor] | None = None
        self._keeping = False
        self._kept: list[tuple[ParamMeta, torch.Tensor]] = []

    def start(self) -> None:
        """Forget what an update that never finished has left."""
        self.close()

    def spec(self, sink: WeightSink, update_info: IPCWeightTransferUpdateInfo) -> UpdateSpec:
        """What the update that begins with this message brings."""
        metadata = stock_metadata(update_info)
        if isinstance(update_info.ipc_handles, dict):
            held = sink.inventory()
            self._keeping = not held or sink.cast or not sink.strict
            self._keeping |= any(len(one.names) > 1 or one.buffer for one in held)
            if held:
                metadata = tuple(ParamMeta(one.names[0], one.dtype, one.shape) for one in held if not one.buffer)
        return UpdateSpec(metadata=metadata, scope=update_info.scope)

    def receive(self, sink: WeightSink, update_info: IPCWeightTransferUpdateInfo) -> None:
        """Bring one message's tensors into the sink; when it returns, the trainer may overwrite them.

        Raises:
            MessageError: No handle for this GPU, or one that does not fit what the message names.
            Unsupported: This worker is not on a GPU, or cannot open the trainer's memory.
            UpdateRefused: The sink does not take it.
        """
        metadata = stock_metadata(update_info)
        handles = own_handles(update_info.ipc_handles, self.uuid())
        if isinstance(update_info.ipc_handles, dict):
            pairs = self._unpacked(handles[0], metadata, update_info.tensor_sizes)
        else:
            pairs = self._rebuilt(handles, metadata)
        if self._keeping:
            self._kept += [(meta, one.clone()) for meta, (_, one) in zip(metadata, pairs, strict=True)]
        else:
            sink.load(pairs)
        self.settle()

    def finish(self, sink: WeightSink) -> None:
        """Bring what was kept into the sink, and let go of the trainer's memory; idempotent.

        Raises:
            UpdateRefused: The sink does not take it.
        """
        kept, self._kept = self._kept, []
        self.close()
        if kept:
            sink.abort()
            sink.begin(UpdateSpec(metadata=tuple(meta for meta, _ in kept)))
            sink.load([(meta.name, tensor) for meta, tensor in kept])

    def close(self) -> None:
        """Let go of the trainer's memory and of what was kept; idempotent."""
        self._imported, self._keeping = None, False
        self._kept.clear()

    def _rebuilt(self, handles: list[HandleArguments], metadata: tuple[ParamMeta, ...]) -> Pairs:
        for meta, one in zip(metadata, handles, strict=True):
            if (one.size, one.dtype) != (meta.shape, meta.dtype):
                raise MessageError(
                    f"{meta.name!r} is named as {meta.dtype} of shape {meta.shape}, and its handle is of {one.dtype} "
                    f"and shape {one.size}",
                    parameter=meta.name,
                )
        return [(meta.name, self.rebuild(one)) for meta, one in zip(metadata, handles, strict=True)]

    def _unpacked(self, handle: HandleArguments, metadata: tuple[ParamMeta, ...], sizes: list[int] | None) -> Pairs:
        """The tensors of a fill, each a view of the buffer or, where it would be misaligned, a copy."""
        if sizes is None:
            raise MessageError("a packed update needs tensor_sizes")
        for meta, size in zip(metadata, sizes, strict=True):
            if meta.nbytes != size:
                words = f"{meta.name!r} has {meta.nbytes} bytes by its shape and dtype, and {size} in tensor_sizes"
                raise MessageError(words, parameter=meta.name)
        total = total_bytes(metadata)
        if handle.dtype != torch.uint8 or handle.stride != (1,) or total > handle.numel:
            raise MessageError(
                f"tensor_sizes are {total} bytes in all, and the handle is of {handle.dtype}, shape {handle.size} and "
                f"stride {handle.stride}: a packed buffer is flat bytes and holds them all"
            )
        if self._imported is None or self._imported[0] != handle:
            self._imported = None  # the old one goes before the new one comes
            self._imported = handle, self.rebuild(handle)
        return unpack(self._imported[1][:total], metadata)

    # What touches the device

    def uuid(self) -> str:
        """The uuid of this worker's GPU.

        Raises:
            Unsupported: It has none.
        """
        refuse_without_gpu(self._device)
        return device_uuid(self._device)

    def rebuild(self, handle: HandleArguments) -> torch.Tensor:
        """Import what a handle names; dropping the tensor lets go.

        Raises:
            Unsupported: It cannot be opened here.
        """
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        try:
            tensor: torch.Tensor = rebuild_cuda_tensor(*handle.arguments(device=index))  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if handle.storage is None:
                raise
            raise cannot_open(handle.storage, error) from error
        return tensor

    def settle(self) -> None:
        """Wait until this device has read what it was given."""
        torch.cuda.synchronize(self._device)
