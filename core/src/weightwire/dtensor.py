"""torch's distributed tensors as owners, mesh and placements: the one place that knows DTensor and FSDP.

Nothing here imports DTensor or FSDP, which costs a second: a process that has not imported them holds none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from weightwire.errors import Unsupported
from weightwire.layout import Placement, Replicate, Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """How a DTensor lies over its mesh, in the terms of `ParamMeta`.

    Attributes:
        owners: The global ranks of the mesh, in the order in which its axes cut the tensor.
        mesh_shape: The shape of the mesh over `owners`.
        placements: One for each axis; None where no `Shard` and `Replicate` describe the pieces.
        reason: Why they do not, and a whole tensor has to stand for the piece; empty where they do.
    """

    owners: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...] | None
    reason: str = ""


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is a `torch.distributed.tensor.DTensor`."""
    return isinstance(tensor, _loaded("torch.distributed.tensor", "DTensor"))


def _loaded(module: str, name: str) -> Any:
    """A class of a module that may not have been imported, for isinstance: then nothing is an instance."""
    return getattr(sys.modules.get(module), name, ())


def mesh_layout(tensor: DTensor) -> MeshLayout:
    """Read a DTensor's layout; global shapes and ranks only, nothing is gathered.

    A mesh sliced out of a larger one (`mesh["dp"]`) is taken with its siblings: under FSDP2 over tensor parallelism a
    norm is sharded on `dp` alone, each tensor-parallel rank has a mesh of its own for it, and all hold the same.
    That adds an outer axis that replicates, and makes the layout the same on every rank.
    """
    grid = _with_siblings(tensor.device_mesh)
    placements: list[Any] = list(tensor.placements)
    outer = grid.ndim - len(placements)
    order = cutting_order(placements, tuple(grid.shape)[outer:])
    if order is None:
        words = ", ".join(map(repr, placements))
        reason = f"placements ({words}) on a mesh of {tuple(tensor.device_mesh.shape)} are not boxes of the tensor"
        return MeshLayout(tuple(grid.flatten().tolist()), tuple(grid.shape), None, reason)
    grid = grid.permute([*range(outer), *(outer + axis for axis in order)])
    plain = [Replicate()] * outer + [_plain(placements[axis], tensor.ndim) for axis in order]
    return MeshLayout(tuple(grid.flatten().tolist()), tuple(grid.shape), tuple(plain))


def _with_siblings(mesh: DeviceMesh) -> Tensor:
    """The ranks of a mesh; with a leading axis over all slices of its kind if it is a slice of a larger mesh."""
    layout, ranks = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is None or ranks is None:
        return mesh.mesh
    slices: Tensor = layout.remap_to_tensor(ranks)
    return slices[0] if len(slices) == 1 else slices


def cutting_order(placements: Sequence[Any], mesh_shape: tuple[int, ...]) -> list[int] | None:
    """The mesh axes in the order in which they cut the tensor, so that each is a plain `Shard` or `Replicate`.

    `Shard` cuts in mesh order. FSDP2 over tensor parallelism has a `_StridedShard`: its axis stands before the
    tensor-parallel one and cuts after it, and `split_factor` is into how many pieces the dimension has been
    cut by then. (How torch's `DTensorSpec` turns strided shards into an order.)

    Args:
        placements: Torch's placements, one for each mesh axis.
        mesh_shape: The sizes of these axes.

    Returns:
        A permutation of the axes that moves none but those of a dimension with a strided shard; None if there is
        a partial sum or another placement, or a split factor that no order explains.
    """
    by_dim: dict[int, list[int]] = {}
    for axis in reversed(range(len(placements))):
        kind = type(placements[axis]).__name__
        if kind in ("Shard", "_StridedShard"):
            axes = by_dim.setdefault(placements[axis].dim, [])
            # Private to torch, and a subclass of Shard in some releases: known by name wherever it lives.
            wanted = placements[axis].split_factor if kind == "_StridedShard" else 1
            position = _position(axes, wanted, mesh_shape)
            if position is None:
                return None
            axes.insert(position, axis)
        elif kind != "Replicate":
            return None
    order = list(range(len(placements)))
    for axes in by_dim.values():
        for slot, axis in zip(sorted(axes), axes, strict=True):
            order[slot] = axis
    return order


def _position(axes: list[int], pieces: int, mesh_shape: tuple[int, ...]) -> int | None:
    """How many of `axes` must have cut to leave `pieces` pieces; None if no number of them does."""
    cuts = 1
    for position, axis in enumerate(axes):
        if cuts == pieces:
            return position
        cuts *= mesh_shape[axis]
    return len(axes) if cuts == pieces else None


def _plain(placement: Any, ndim: int) -> Placement:
    return Replicate() if type(placement).__name__ == "Replicate" else Shard(placement.dim % ndim)


def is_member(tensor: DTensor) -> bool:
    """Whether this process is on the tensor's mesh."""
    return tensor.device_mesh.get_coordinate() is not None


def whole(tensor: DTensor) -> Tensor:
    """The full tensor: a collective among the ranks of its mesh.

    Raises:
        Unsupported: The ranks along an axis of the mesh do not ascend: torch would put the pieces together in
            ascending order all the same.
    """
    ranks = tensor.device_mesh.mesh
    if any(bool((ranks.diff(dim=axis) < 0).any()) for axis in range(ranks.ndim)):
        raise Unsupported(f"torch gathers in ascending order of ranks, and the device mesh is {ranks.tolist()}")
    with torch.no_grad():
        return tensor.full_tensor()


def piece(tensor: DTensor) -> Tensor:
    """The piece of this rank, without a copy."""
    with torch.no_grad():
        return tensor.to_local()


def reshard(module: nn.Module) -> None:
    """Put FSDP2's sharded parameters back where a forward pass has left the gathered ones, as state_dict does.

    Gathered parameters are plain, and under mixed precision of another dtype: metadata would depend on when
    it is read. Nothing moves between ranks.

    Raises:
        Unsupported: The module is wrapped by FSDP1, whose parameters are pieces of flattened buffers.
    """
    fully_sharded = _loaded("torch.distributed.fsdp", "FSDPModule")
    flattened = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    if not (fully_sharded or flattened):
        return
    for name, submodule in module.named_modules():
        if isinstance(submodule, flattened):
            raise Unsupported(
                f"module {name!r} is a FullyShardedDataParallel (FSDP1), whose parameters have no shape of their "
                "own: shard the model with fully_shard (FSDP2)"
            )
        if isinstance(submodule, fully_sharded):
            submodule.reshard()
