"""The ways in which Ray itself carries a chunk: as a direct transport of tensors, or through its object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from weightwire.errors import TransferError
from weightwire_rdt.cluster import join_cluster


class Carrier(Protocol):
    """Puts the buffers of a chunk where a reference finds them, and gets them from there.

    Attributes:
        divides: See `Inbound`.
        holds: Whether what has been put takes room until it is read.
    """

    divides: bool
    holds: bool

    def put(self, buffers: Sequence[Tensor]) -> tuple[Any, object]:
        """Returns the reference, and what must be kept until the chunk has been read."""

    def get(self, reference: Any, buffers: Sequence[Tensor], seconds: float) -> None:
        """Have a chunk written into `buffers`.

        Raises:
            Exception: Ray's.
        """


class ObjectStore:
    """Through the object stores of the nodes: two copies, and a third between nodes; it is there wherever Ray is."""

    divides = True
    holds = True

    def put(self, buffers: Sequence[Tensor]) -> tuple[Any, object]:
        """See `Carrier.put`."""
        reference = join_cluster().put([buffer.cpu().numpy() for buffer in buffers])
        return reference, reference

    def get(self, reference: Any, buffers: Sequence[Tensor], seconds: float) -> None:
        """See `Carrier.get`."""
        arrays = join_cluster().get(reference, timeout=seconds)
        if sum(map(len, arrays)) != sum(buffer.numel() for buffer in buffers):
            raise TransferError("a chunk of another size arrived than was asked for")
        array, at, waiting = np.empty(0, np.uint8), 0, iter(arrays)
        for buffer in buffers:
            done = 0
            while done < buffer.numel():
                if at == len(array):
                    array, at = next(waiting), 0
                count = min(buffer.numel() - done, len(array) - at)
                _copy(array[at : at + count], buffer[done : done + count])
                done, at = done + count, at + count


def _copy(array: Any, buffer: Tensor) -> None:
    if buffer.device.type == "cpu":
        np.copyto(buffer.numpy(), array)
    else:
        buffer.copy_(torch.from_numpy(array.copy()))  # what Ray gives may not be written to, and torch would warn


class RayNixl:
    """Ray's direct transport over NIXL: read from the memory of whoever put it."""

    divides = False
    holds = False

    def put(self, buffers: Sequence[Tensor]) -> tuple[Any, object]:
        """See `Carrier.put`."""
        ray = join_cluster()
        reference = ray.put(list(buffers), _tensor_transport="nixl")
        # In a box: whoever unpacks such a reference needs torch, and the producer does without.
        return ray.put([reference]), reference

    def get(self, reference: Any, buffers: Sequence[Tensor], seconds: float) -> None:
        """See `Carrier.get`."""
        ray = join_cluster()
        from ray.experimental import set_target_for_ref

        (inner,) = ray.get(reference, timeout=seconds)
        try:
            set_target_for_ref(inner, list(buffers))
            ray.get(inner, timeout=seconds)
        finally:
            _forget(ray, inner)


def _forget(ray: Any, reference: Any) -> None:
    """Ray 2.60 keeps what it knows of such a reference for as long as the process that borrowed it lives."""
    manager = ray._private.worker.global_worker.rdt_manager
    getattr(manager, "_managed_rdt_metadata", {}).pop(reference.hex(), None)


CARRIERS: Final[dict[str, type[Carrier]]] = {"ray_nixl": RayNixl, "object_store": ObjectStore}
