"""Hypothesis strategies for everything that has arithmetic: dtypes, shapes, meshes, metadata and odd tensors.

Public, for the tests of transports outside this repository as well. Sizes stay small, and lean to what goes wrong:
extents of 0 and 1, uneven splits, more ranks than rows, ranks in no particular order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from hypothesis import strategies as st
from torch import Tensor

from weightwire.layout import ParamMeta, Placement, Replicate, Shard

DTYPES: Final = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
)
"""The dtypes that are drawn: what checkpoints hold, and what transports tend to refuse."""

_SIDES: Final = (0, 1, 2, 3, 4, 5, 7, 8, 10)


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """One of `DTYPES`."""
    return st.sampled_from(DTYPES)


def shapes(*, max_dims: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to `max_dims` dimensions with extents of 0 to 10."""
    return st.lists(st.sampled_from(_SIDES), max_size=max_dims).map(tuple)


@st.composite
def meshes(draw: st.DrawFn, *, max_axes: int = 3, max_ranks: int = 12) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A mesh: its owners, distinct ranks in any order and with gaps, and its shape."""
    shape: list[int] = []
    for _ in range(draw(st.integers(1, max_axes))):
        shape.append(draw(st.integers(1, max(1, min(5, max_ranks // math.prod(shape))))))
    size = math.prod(shape)
    ranks = draw(st.permutations(range(size + draw(st.integers(0, 2)))))
    return tuple(ranks[:size]), tuple(shape)


def placements(shape: Sequence[int], mesh_shape: Sequence[int]) -> st.SearchStrategy[tuple[Placement, ...]]:
    """A placement for each mesh axis that a tensor of `shape` can have; several axes may shard one dimension."""
    options: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    return st.tuples(*(st.sampled_from(options) for _ in mesh_shape))


def names() -> st.SearchStrategy[str]:
    """Parameter names, most like a checkpoint's (`layers.3.weight`), some with any text in them."""
    segment = st.sampled_from(("model", "layers", "0", "1", "12", "proj", "weight", "bias"))
    dotted = st.lists(segment, min_size=1, max_size=4).map(".".join)
    # Few characters: hypothesis takes seconds to tabulate all of them.
    return dotted | st.text('az09._-/ é層"\\\n', min_size=1, max_size=8)


@st.composite
def param_metas(
    draw: st.DrawFn, *, name: str | None = None, sharded: bool | None = None, max_ranks: int = 12
) -> ParamMeta:
    """One parameter's metadata.

    Args:
        draw: Given by hypothesis.
        name: Its name; any if None.
        sharded: True for placements with a shard, which needs a dimension; False for none; None for either.
        max_ranks: The most owners it has.
    """
    name = draw(names()) if name is None else name
    shape = draw(shapes().filter(bool) if sharded else shapes())
    owners, mesh_shape = draw(meshes(max_ranks=max_ranks))
    chosen = draw(placements(shape, mesh_shape))
    if sharded and not any(isinstance(placement, Shard) for placement in chosen):
        chosen = (Shard(draw(st.integers(0, len(shape) - 1))), *chosen[1:])
    if sharded is False or (sharded is None and draw(st.booleans())):
        return ParamMeta(name, draw(dtypes()), shape, owners=draw(st.sampled_from((None, owners))))
    return ParamMeta(name, draw(dtypes()), shape, owners=owners, mesh_shape=mesh_shape, placements=chosen)


@st.composite
def metadata_lists(draw: st.DrawFn, *, max_size: int = 6, max_ranks: int = 12) -> list[ParamMeta]:
    """The metadata of a model: parameters with distinct names, owned by all ranks or by some."""
    chosen = draw(st.lists(names(), max_size=max_size, unique=True))
    return [draw(param_metas(name=name, max_ranks=max_ranks)) for name in chosen]


@st.composite
def tensors(draw: st.DrawFn, *, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
    """A contiguous tensor of random bytes, NaNs, infinities and subnormals among them; bools are 0 or 1."""
    dtype = draw(dtypes()) if dtype is None else dtype
    shape = draw(shapes()) if shape is None else shape
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def _reversed_dims(tensor: Tensor) -> Tensor:
    return tensor.permute(tuple(reversed(range(tensor.ndim))))


def _every_second(tensor: Tensor) -> Tensor:
    return tensor[..., ::2] if tensor.ndim else tensor


def _behind_an_offset(tensor: Tensor) -> Tensor:
    return tensor[1:] if tensor.ndim and len(tensor) else tensor


def _expanded(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0).expand(3, *tensor.shape)


def _conjugated(tensor: Tensor) -> Tensor:
    return tensor.conj()


def _negated(tensor: Tensor) -> Tensor:
    return tensor.conj().imag if tensor.is_complex() else tensor


ODDITIES: Final[tuple[Callable[[Tensor], Tensor], ...]] = (
    _reversed_dims,
    _every_second,
    _behind_an_offset,
    _expanded,
    _conjugated,
    _negated,
)
"""Views that make of a contiguous tensor one that is transposed, strided, offset, expanded, conjugated or negated."""


@st.composite
def odd_tensors(draw: st.DrawFn) -> Tensor:
    """A tensor as models really hold them: plain, or a view of another after up to two `ODDITIES`."""
    tensor = draw(tensors())
    for oddity in draw(st.lists(st.sampled_from(ODDITIES), max_size=2)):
        tensor = oddity(tensor)
    return tensor


@st.composite
def state_dicts(draw: st.DrawFn, *, max_size: int = 6) -> dict[str, Tensor]:
    """Named odd tensors, some of them tied to an earlier one or another piece of its storage.

    A tied name holds the same tensor, or a second object for it as `state_dict()` makes them.
    """
    state_dict: dict[str, Tensor] = {}
    for name in draw(st.lists(names(), max_size=max_size, unique=True)):
        kind = draw(st.sampled_from(("new", "new", "same", "alias", "sharing")))
        earlier = draw(st.sampled_from(sorted(state_dict))) if state_dict else None
        if kind == "new" or earlier is None:
            state_dict[name] = draw(odd_tensors())
        elif kind == "same":
            state_dict[name] = state_dict[earlier]
        elif kind == "alias":
            state_dict[name] = state_dict[earlier].detach()
        else:
            state_dict[name] = _behind_an_offset(state_dict[earlier].detach())
    return state_dict
