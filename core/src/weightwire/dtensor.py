"""DTensors as owners, mesh and placements; the one place that knows torch's distributed tensors.

FSDP2 over tensor parallelism places a parameter as `_StridedShard` (the data-parallel axis, which cuts after the
tensor-parallel one although it stands before it) and `Shard`. That is a plain `Shard` on the mesh with the strided axis
moved behind the axes it skips, if its split factor is the product of those axes; see `_plain_order`.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

from weightwire.layout import Placement, Replicate, Shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Layout = tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...] | None]


def _as_dtensor(tensor: Tensor) -> DTensor | None:
    # A process that has never imported DTensor holds none.
    module = sys.modules.get("torch.distributed.tensor")
    cls = getattr(module, "DTensor", None)
    return tensor if cls is not None and isinstance(tensor, cls) else None


def _plain_order(dtensor: Any) -> tuple[list[int], tuple[Placement, ...]] | None:
    """Mesh axes in the order in which they cut, with plain placements; None where there is no such order."""
    from torch.distributed.tensor import placement_types as types

    strided = getattr(types, "_StridedShard", None)
    sizes = tuple(dtensor.device_mesh.mesh.shape)
    placements: list[Placement] = []
    skips: list[tuple[int, int]] = []
    for axis, placement in enumerate(dtensor.placements):
        if strided is not None and type(placement) is strided:
            later = [
                at
                for at in range(axis + 1, len(sizes))
                if getattr(dtensor.placements[at], "dim", None) == placement.dim
            ]
            if placement.split_factor != math.prod(sizes[at] for at in later):
                return None
            if later:
                skips.append((axis, later[-1]))
            placements.append(Shard(placement.dim))
        elif type(placement) is types.Shard:
            placements.append(Shard(placement.dim))
        elif type(placement) is types.Replicate:
            placements.append(Replicate())
        else:
            return None
    order = list(range(len(sizes)))
    for axis, behind in skips:
        order.remove(axis)
        order.insert(order.index(behind) + 1, axis)
    return order, tuple(placements[axis] for axis in order)


def layout_of(tensor: Tensor) -> Layout | None:
    """Owners, mesh shape and placements of a DTensor; None for a plain tensor.

    Placements are None where no `Shard` describes the pieces: then the parameter counts as replicated.
    """
    dtensor = _as_dtensor(tensor)
    if dtensor is None:
        return None
    mesh = dtensor.device_mesh.mesh
    plain = _plain_order(dtensor)
    if plain is None:
        return tuple(mesh.flatten().tolist()), tuple(mesh.shape), None
    order, placements = plain
    permuted = mesh.permute(order)
    return tuple(permuted.flatten().tolist()), tuple(permuted.shape), placements


def gather_reason(tensor: Tensor) -> str | None:
    """Why `local_piece` has to gather this tensor; None where it does not."""
    dtensor = _as_dtensor(tensor)
    if dtensor is None or _plain_order(dtensor) is not None:
        return None
    return f"placements {tuple(map(str, dtensor.placements))} are not plain shards"


def is_member(tensor: Tensor) -> bool:
    """Whether this process is on the tensor's mesh; true for a plain tensor."""
    dtensor = _as_dtensor(tensor)
    return dtensor is None or dtensor.device_mesh.get_coordinate() is not None


def materialise(tensor: Tensor) -> Tensor:
    """The whole tensor; a collective among its owners where it is a DTensor."""
    dtensor = _as_dtensor(tensor)
    return tensor if dtensor is None else dtensor.full_tensor()


def local_piece(tensor: Tensor) -> Tensor:
    """This rank's piece; the whole where it cannot be described as a piece."""
    dtensor = _as_dtensor(tensor)
    if dtensor is None:
        return tensor
    return dtensor.to_local() if _plain_order(dtensor) is not None else dtensor.full_tensor()
