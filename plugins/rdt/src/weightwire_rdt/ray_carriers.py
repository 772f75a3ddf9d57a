"""The ways in which Ray itself carries a chunk: as a direct transport of tensors, or through its object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from weightwire.errors import TransferError
from weightwire_rdt.cluster import join_cluster
from weightwire_rdt.registrations import Registrations


class Carrier(Protocol):
    """Puts the buffers of a chunk where a reference finds them, and gets them from there.

    Attributes:
        divides: See `Inbound`.
        holds: Whether what has been put takes room until it is read.
    """

    divides: bool
    holds: bool

    def put(self, buffers: Sequence[Tensor]) -> Any:
        """A reference to a chunk, which must be kept until it has been read."""

    def begin_round(self) -> None:
        """A round begins."""

    def close(self) -> None:
        """Let go of everything."""

    def pack(self, references: list[Any]) -> list[Any]:
        """References to chunks as they go through an actor that does not look into them."""

    def unpack(self, packed: list[Any], seconds: float) -> list[Any]:
        """The references that were packed."""

    def get(self, reference: Any, buffers: Sequence[Tensor], seconds: float) -> None:
        """Have a chunk written into `buffers`.

        Raises:
            Exception: Ray's.
        """


class ObjectStore:
    """Through the object stores of the nodes: two copies, and a third between nodes; it is there wherever Ray is."""

    divides = True
    holds = True

    def begin_round(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def put(self, buffers: Sequence[Tensor]) -> Any:
        """See `Carrier.put`."""
        return join_cluster().put([buffer.cpu().numpy() for buffer in buffers])

    def pack(self, references: list[Any]) -> list[Any]:
        """See `Carrier.pack`."""
        return references

    def unpack(self, packed: list[Any], seconds: float) -> list[Any]:
        """See `Carrier.unpack`."""
        return packed

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

    def __init__(self) -> None:
        # Ray registers what it has not been told of, and what it takes back again has the other process connect anew.
        self._registrations = Registrations(_register, _deregister)

    def begin_round(self) -> None:
        """Take back what has been freed."""
        self._registrations.sweep()

    def close(self) -> None:
        """Take everything back."""
        self._registrations.close()

    def put(self, buffers: Sequence[Tensor]) -> Any:
        """See `Carrier.put`."""
        for buffer in buffers:
            self._registrations.hold(buffer)
        return join_cluster().put(list(buffers), _tensor_transport="nixl")

    def pack(self, references: list[Any]) -> list[Any]:
        """In a box: whoever unpacks such references needs torch, and the producer does without."""
        return [join_cluster().put(references)]

    def unpack(self, packed: list[Any], seconds: float) -> list[Any]:
        """See `Carrier.unpack`."""
        references: list[Any] = join_cluster().get(packed[0], timeout=seconds)
        return references

    def get(self, reference: Any, buffers: Sequence[Tensor], seconds: float) -> None:
        """See `Carrier.get`."""
        ray = join_cluster()
        from ray.experimental import set_target_for_ref

        for buffer in buffers:
            self._registrations.hold(buffer)
        try:
            set_target_for_ref(reference, list(buffers))
            ray.get(reference, timeout=seconds)
        finally:
            _forget(ray, reference)


class _Storage:
    """What Ray asks of a tensor whose memory it forgets; the tensor itself may be gone."""

    def __init__(self, address: int) -> None:
        self._address = address

    def untyped_storage(self) -> _Storage:
        return self

    def data_ptr(self) -> int:
        return self._address


def _register(tensor: Tensor) -> int:
    from ray.experimental import register_nixl_memory

    register_nixl_memory(tensor)
    return tensor.untyped_storage().data_ptr()


def _deregister(address: int) -> None:
    from ray.experimental import deregister_nixl_memory

    deregister_nixl_memory(_Storage(address))


def _forget(ray: Any, reference: Any) -> None:
    """Ray 2.60 keeps what it knows of such a reference for as long as the process that borrowed it lives."""
    manager = ray._private.worker.global_worker.rdt_manager
    getattr(manager, "_managed_rdt_metadata", {}).pop(reference.hex(), None)


CARRIERS: Final[dict[str, type[Carrier]]] = {"ray_nixl": RayNixl, "object_store": ObjectStore}
