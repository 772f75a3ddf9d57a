"""What a stock trainer does on its GPU: export tensors for one importer each, and wait until they are written."""

from __future__ import annotations

import torch

from weightwire.errors import Unsupported
from weightwire_ipc.device import device_uuid, release_exports, share_storage
from weightwire_ipc.handles import HandleArguments


class StockExporter:
    """The exports of one trainer rank, each kept until `release`."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._device: torch.device | None = None

    def allocate(self, size: int, device: torch.device | None) -> torch.Tensor:
        """A packed buffer of `size` bytes on `device` if that is a GPU, else on the current GPU."""
        on_gpu = device is not None and device.type == "cuda"
        return torch.empty(size, dtype=torch.uint8, device=device if on_gpu else "cuda")

    def export(self, tensor: torch.Tensor) -> tuple[str, HandleArguments]:
        """Export a tensor for one importer.

        Returns:
            The GPU's uuid, and the arguments of torch's `rebuild_cuda_tensor`.

        Raises:
            Unsupported: It is not on a GPU.
        """
        device = self._device = tensor.device
        if device.type != "cuda":
            raise Unsupported(
                f"wire='vllm' exports memory of a GPU, and this tensor is on {device}: move the model there, or use "
                "wire='weightwire' with memory='host'",
                transport="ipc",
            )
        storage, shared = tensor.untyped_storage(), None
        if storage.nbytes():
            # One export for each tensor, also of one storage: the importer lets go once for each.
            shared, keeper = share_storage(storage)
            self._kept.append(keeper)
        offset, stride = int(tensor.storage_offset()), tensor.stride()
        arguments = HandleArguments(tuple(tensor.shape), stride, offset, tensor.dtype, device.index, shared)
        return device_uuid(device), arguments

    def fence(self) -> None:
        """Wait until what was exported is written, as far as this thread's work goes."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def collect(self) -> None:
        """Free memory of exports dropped earlier whose importers have let go since."""
        release_exports()

    def release(self) -> None:
        """Drop every export; memory whose importer has let go is free."""
        self._kept.clear()
        self.collect()
