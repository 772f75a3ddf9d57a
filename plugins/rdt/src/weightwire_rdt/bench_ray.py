"""What Ray alone does with the same tensors: its direct transport into buffers that are kept, and its object store."""

from __future__ import annotations

import time
from typing import Any, Final

import torch
from torch import Tensor

from weightwire.testing.measure import Seat, Way
from weightwire_rdt.bench_desk import Desk
from weightwire_rdt.cluster import join_cluster

_NAMESPACE: Final = "weightwire-bench"
_SECONDS: Final = 60.0
_PAUSE: Final = 0.01


class RawRay(Way):
    """All tensors as one object.

    Args:
        name: `raw_ray_nixl`, read into tensors that are registered and kept, or `raw_object_store`, where they come as
            new ones.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._direct = name == "raw_ray_nixl"

    def connect(self, seat: Seat, offers: list[Any]) -> None:
        """Start or find the desk, and register the tensors."""
        ray = join_cluster()
        self._tensors = seat.tensors() if seat.sends else [torch.zeros_like(tensor) for tensor in seat.tensors()]
        if seat.sends:
            made = ray.remote(Desk).options(name=self.name, namespace=_NAMESPACE, num_cpus=0)
            self._desk = made.remote()
            ray.get(self._desk.__ray_ready__.remote(), timeout=_SECONDS)
        else:
            self._desk = _found(ray, self.name)
        if self._direct:
            # Last: Ray's NIXL has a thread that polls without a pause, and its actors yield to other processes.
            from ray.experimental import register_nixl_memory

            for tensor in self._tensors:
                register_nixl_memory(tensor)

    def held(self, seat: Seat) -> list[Tensor]:
        """What is put, or what it is got into."""
        return self._tensors

    def step(self, seat: Seat) -> None:
        """Put, or get."""
        ray = join_cluster()
        if seat.sends:
            # In a box of its own: the desk has no need to import torch.
            if self._direct:
                inner = ray.put(self._tensors, _tensor_transport="nixl")
                reference = ray.put([inner])
            else:
                reference = ray.put(self._tensors)
            ray.get(self._desk.put.remote([reference]), timeout=_SECONDS)
            return
        (reference,) = ray.get(self._desk.get.remote(), timeout=_SECONDS)
        if self._direct:
            from ray.experimental import set_target_for_ref

            (inner,) = ray.get(reference)
            set_target_for_ref(inner, self._tensors)
            ray.get(inner, timeout=_SECONDS)
        else:
            self._tensors = ray.get(reference, timeout=_SECONDS)
        ray.get(self._desk.taken.remote(), timeout=_SECONDS)


def _found(ray: Any, name: str) -> Any:
    until = time.monotonic() + _SECONDS
    while True:
        try:
            return ray.get_actor(name, namespace=_NAMESPACE)
        except ValueError:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE)
