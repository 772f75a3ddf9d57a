"""The model of the benchmark: sharded over trainer ranks as FSDP2 does it, fused and tensor-parallel on workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor, nn

from weightwire.layout import ParamMeta, Shard
from weightwire.source import WeightSource, as_bytes
from weightwire.testing.payload import Payload, randomize

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_ROWS = ("o_proj", "down_proj")


def original(payload: Payload, place: int) -> Tensor:
    """Parameter `place` in full, the same random bytes in every process."""
    tensor = torch.empty(payload.shapes[place], dtype=payload.dtype)
    randomize(as_bytes(tensor), torch.Generator().manual_seed(place))
    return tensor


def metadata_of(payload: Payload, trainers: int) -> list[ParamMeta]:
    """Every parameter sharded on its first dimension."""
    ranks = tuple(range(trainers))
    return [
        ParamMeta(name, payload.dtype, shape, owners=ranks, mesh_shape=(trainers,), placements=(Shard(0),))
        for name, shape in zip(payload.names, payload.shapes, strict=True)
    ]


class ShardedSource(WeightSource):
    """One trainer rank's shards.

    Args:
        payload: The model.
        rank: This trainer rank.
        trainers: How many there are.
    """

    def __init__(self, payload: Payload, rank: int, trainers: int) -> None:
        self._payload, self._trainers = payload, trainers
        self.shards = [
            original(payload, place)[meta.box(rank).slices()].clone() for place, meta in enumerate(self.metadata)
        ]

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """See `metadata_of`."""
        return metadata_of(self._payload, self._trainers)

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """The shards."""
        yield from zip(self._payload.names, self.shards, strict=True)

    def resident(self) -> tuple[list[str], list[Tensor]]:
        """The shards, which are all there."""
        return list(self._payload.names), self.shards


class TensorParallel(nn.Module):
    """One rank's part of the model, with query, key and value fused, and gate and up projections.

    Args:
        payload: The model.
        rank: This rank.
        size: How many ranks it is spread over.
    """

    def __init__(self, payload: Payload, rank: int, size: int) -> None:
        super().__init__()
        self._rank, self._size = rank, size
        self._at: dict[str, tuple[str, int | None, int]] = {}
        rows: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in zip(payload.names, payload.shapes, strict=True):
            kind = name.split(".")[-2]
            dim = None if "norm" in kind else 1 if kind in _ROWS else 0
            local = tuple(self._extent(extent) if at == dim else extent for at, extent in enumerate(shape))
            own = name.replace(kind, _FUSED.get(kind, kind)).replace(".", "_")
            self._at[name] = own, dim, rows.get(own, 0)
            rows[own] = rows.get(own, 0) + local[0]
            shapes[own] = (rows[own], *local[1:])
        for own, shape in shapes.items():
            self.register_parameter(own, nn.Parameter(torch.zeros(shape, dtype=payload.dtype), requires_grad=False))

    def _extent(self, extent: int) -> int:
        step = -(-extent // self._size)
        return max(0, min(step, extent - self._rank * step))

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Narrow each checkpoint tensor to this rank's part, and put it in its place."""
        for name, tensor in pairs:
            own, dim, row = self._at[name]
            if dim is not None:
                step = -(-tensor.shape[dim] // self._size)
                tensor = tensor.narrow(dim, min(self._rank * step, tensor.shape[dim]), self._extent(tensor.shape[dim]))
            self.get_parameter(own).data[row : row + tensor.shape[0]].copy_(tensor)
