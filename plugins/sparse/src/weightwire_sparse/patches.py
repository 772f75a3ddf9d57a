"""A caller's own patches, in checkpoint coordinates, as the reference has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weightwire.errors import UpdateRefused
from weightwire.layout import ParamMeta
from weightwire.source import as_bytes
from weightwire_sparse.changes import Changes
from weightwire_sparse.pieces import AddressSpace, spaces_of

_INT32_ELEMENTS = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class SparseWeightPatch:
    """New values for some elements of one checkpoint tensor.

    Attributes:
        name: Its checkpoint name.
        indices: 1-D positions in the flattened full tensor, int32; int64 for a tensor that int32 cannot count.
        values: 1-D, as many, of the checkpoint's dtype; any bits, NaN too.
        full_shape: Shape of the full tensor.
    """

    name: str
    indices: Tensor
    values: Tensor
    full_shape: Sequence[int] | None = None


def metadata_of(patches: Sequence[SparseWeightPatch]) -> tuple[ParamMeta, ...]:
    """What the patches are of, once all of them are known to be good.

    Raises:
        UpdateRefused: A shape is missing, indices are not 1-D int32 (int64 for tensors of more than 2^31 elements), out
            of range or repeated, values are not 1-D or not as many, or a name comes twice.
    """
    metadata: list[ParamMeta] = []
    seen: set[str] = set()
    for patch in patches:
        if not isinstance(patch, SparseWeightPatch):
            raise UpdateRefused(f"send_weights takes SparseWeightPatch objects, not {type(patch).__name__}")
        if patch.name in seen:
            raise _refusal(patch, "comes twice in one call; put its elements into one patch")
        seen.add(patch.name)
        metadata.append(_checked(patch))
    return tuple(metadata)


def _refusal(patch: SparseWeightPatch, words: str) -> UpdateRefused:
    return UpdateRefused(f"the patch of {patch.name!r} {words}", transport="sparse_nccl", parameter=patch.name)


def _checked(patch: SparseWeightPatch) -> ParamMeta:
    if patch.full_shape is None:
        raise _refusal(patch, "has no full_shape: say the shape of the whole checkpoint tensor")
    meta = ParamMeta(patch.name, patch.values.dtype, tuple(patch.full_shape))
    wanted = torch.int32 if meta.numel < _INT32_ELEMENTS else torch.int64
    if patch.indices.dtype != wanted or patch.indices.dim() != 1:
        found = f"{patch.indices.dtype} of shape {tuple(patch.indices.shape)}"
        raise _refusal(patch, f"has indices of {found}: give 1-D {wanted} ones for {meta.numel} elements")
    if patch.values.shape != patch.indices.shape:
        raise _refusal(patch, f"has {len(patch.indices)} indices for values of shape {tuple(patch.values.shape)}")
    if len(patch.indices):
        ordered = patch.indices.sort().values
        outside = int(ordered[0]) if ordered[0] < 0 else int(ordered[-1])
        if not 0 <= outside < meta.numel:
            raise _refusal(patch, f"names position {outside} of {meta.numel} elements")
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise _refusal(patch, f"names position {int(twice[0])} twice")
    return meta


def space_of(metadata: Sequence[ParamMeta]) -> AddressSpace:
    """The addresses of the patches of these tensors: all of them from trainer rank 0."""
    return spaces_of(metadata, 1).get(0) or AddressSpace(0, ())


def changes_of(patches: Sequence[SparseWeightPatch], space: AddressSpace) -> Changes:
    """Good patches as changes: in the order of their addresses, whatever strides they had."""
    addresses, values = [], []
    for piece, first in zip(space.pieces, space.firsts, strict=False):
        patch = patches[piece.place]
        order = patch.indices.argsort()
        addresses.append(patch.indices[order].cpu().numpy().astype(np.int64) + first)
        values.append(as_bytes(patch.values.detach()[order].cpu().resolve_conj().resolve_neg()).numpy())
    if not addresses:
        return Changes(np.empty(0, np.int64), np.empty(0, np.uint8))
    return Changes(np.concatenate(addresses), np.concatenate(values))
