"""Where each parameter lives: who owns it, and which box of it each owner holds.

Metadata is identical on every rank, so every plan is a pure function of it. `Shard` splits as `torch.chunk` does;
when two mesh axes shard one dim, the outer axis cuts first.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from weightwire.errors import MetadataError


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate along this mesh axis holds the whole extent."""


@dataclass(frozen=True, slots=True)
class Shard:
    """This mesh axis splits tensor dimension `dim` as `torch.chunk` does."""

    dim: int


Placement = Replicate | Shard


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: `start[d] <= index[d] < stop[d]`. All empty boxes of one rank are equal."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.start) == len(self.stop), f"{self.start} and {self.stop} differ in length"
        if any(low >= high for low, high in zip(self.start, self.stop, strict=True)):
            nowhere = (0,) * len(self.start)
            object.__setattr__(self, "start", nowhere)
            object.__setattr__(self, "stop", nowhere)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent in each dimension."""
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def empty(self) -> bool:
        """Whether it holds no element."""
        return self.numel == 0

    def slices(self) -> tuple[slice, ...]:
        """The index that selects this box of a tensor."""
        return tuple(slice(low, high) for low, high in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box:
        """The part that both hold."""
        return Box(
            tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True)),
            tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True)),
        )


def cut(interval: tuple[int, int], parts: int, index: int) -> tuple[int, int]:
    """Piece `index` of `interval` cut into `parts` as `torch.chunk` cuts: equal pieces, then a rest, then nothing."""
    low, high = interval
    size = -((low - high) // parts)
    return min(low + index * size, high), min(low + (index + 1) * size, high)


def _sizes(name: str, what: str, values: Sequence[Any], *, least: int) -> tuple[int, ...]:
    sizes = tuple(values)
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise MetadataError(
                f"parameter {name!r} has {what} {sizes}: {size!r} is not an integer of at least {least}", parameter=name
            )
    return tuple(int(size) for size in sizes)


@dataclass(frozen=True)
class ParamMeta:
    """One parameter: its name, dtype and full shape, and which trainer ranks own it in what layout.

    Attributes:
        name: Name in the checkpoint.
        dtype: Dtype on the wire.
        shape: Full shape.
        owners: Trainer ranks that own it, in mesh order; None means every rank.
        mesh_shape: Row-major shape of the mesh over `owners`; `(len(owners),)` unless given.
        placements: One `Replicate` or `Shard` per mesh axis, describing what `WeightSource.iter_local` yields on each
            owner; None means each holds the whole.

    Raises:
        MetadataError: Sizes, owners, mesh and placements that contradict each other.
        TypeError: A placement that is neither `Replicate` nor `Shard`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Placement, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.dtype, torch.dtype):
            raise MetadataError(f"a parameter has a name and a torch dtype, got {self.name!r} and {self.dtype!r}")
        object.__setattr__(self, "shape", _sizes(self.name, "shape", self.shape, least=0))
        if self.owners is None:
            if self.mesh_shape is not None or self.placements is not None:
                raise self._error("declares a mesh or placements without owners")
            return
        owners = _sizes(self.name, "owners", self.owners, least=0)
        if not owners or len(set(owners)) != len(owners):
            raise self._error(f"needs distinct owners, got {owners}")
        mesh = (len(owners),) if self.mesh_shape is None else self.mesh_shape
        mesh = _sizes(self.name, "mesh_shape", mesh, least=1)
        if math.prod(mesh) != len(owners):
            raise self._error(f"has mesh_shape {mesh}, which does not cover its {len(owners)} owners")
        object.__setattr__(self, "owners", owners)
        object.__setattr__(self, "mesh_shape", mesh)
        object.__setattr__(self, "placements", self._checked_placements(mesh))

    def _checked_placements(self, mesh: tuple[int, ...]) -> tuple[Placement, ...] | None:
        if self.placements is None:
            return None
        placements = tuple(self.placements)
        if len(placements) != len(mesh):
            raise self._error(f"has {len(placements)} placements for a {len(mesh)}-D mesh")
        for placement in placements:
            if isinstance(placement, Shard):
                dim = placement.dim
                if not isinstance(dim, int) or isinstance(dim, bool) or not 0 <= dim < len(self.shape):
                    raise self._error(f"shards dim {dim!r} of a {len(self.shape)}-D tensor")
            elif not isinstance(placement, Replicate):
                raise TypeError(f"parameter {self.name!r}: placement {placement!r} is neither Replicate nor Shard")
        return placements if any(isinstance(placement, Shard) for placement in placements) else None

    def _error(self, words: str) -> MetadataError:
        return MetadataError(f"parameter {self.name!r} {words}", parameter=self.name)

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.numel * self.dtype.itemsize

    @property
    def first_owner(self) -> int:
        """The trainer rank that sends it where one rank does."""
        return 0 if self.owners is None else self.owners[0]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.owners or ())}

    def owned_by(self, rank: int) -> bool:
        """Whether trainer rank `rank` owns it."""
        return self.owners is None or rank in self._places

    def box(self, rank: int) -> Box:
        """The part of the parameter that trainer rank `rank` holds.

        Raises:
            MetadataError: That rank does not own it.
        """
        if not self.owned_by(rank):
            raise self._error(f"is not owned by trainer rank {rank}")
        intervals = [(0, size) for size in self.shape]
        if self.placements is not None:
            assert self.mesh_shape is not None
            place = self._places[rank]
            coordinates = []
            for size in reversed(self.mesh_shape):
                place, coordinate = divmod(place, size)
                coordinates.append(coordinate)
            for placement, size, index in zip(self.placements, self.mesh_shape, reversed(coordinates), strict=True):
                if isinstance(placement, Shard):
                    intervals[placement.dim] = cut(intervals[placement.dim], size, index)
        return Box(tuple(low for low, _ in intervals), tuple(high for _, high in intervals))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what `WeightSource.iter_local` yields on trainer rank `rank`.

        An empty piece keeps the extents of the dimensions that are not cut to nothing, as `torch.chunk`'s does.
        """
        if not self.owned_by(rank):
            raise self._error(f"is not owned by trainer rank {rank}")
        shape = list(self.shape)
        if self.placements is not None:
            assert self.mesh_shape is not None
            place = self._places[rank]
            for axis in range(len(self.mesh_shape)):
                below = math.prod(self.mesh_shape[axis + 1 :])
                placement = self.placements[axis]
                if isinstance(placement, Shard):
                    index = place // below % self.mesh_shape[axis]
                    low, high = cut((0, shape[placement.dim]), self.mesh_shape[axis], index)
                    shape[placement.dim] = high - low
        return tuple(shape)

    def to_json(self) -> dict[str, Any]:
        """The parameter as JSON types, without the keys that have nothing to say."""
        record: dict[str, Any] = {"name": self.name, "dtype": dtype_name(self.dtype), "shape": list(self.shape)}
        if self.owners is not None:
            record["owners"] = list(self.owners)
            if self.mesh_shape != (len(self.owners),):
                record["mesh_shape"] = list(self.mesh_shape or ())
        if self.placements is not None:
            record["placements"] = [one.dim if isinstance(one, Shard) else None for one in self.placements]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ParamMeta:
        """Read what `to_json` wrote.

        Raises:
            MetadataError: Unknown or missing keys, or values of other types.
        """
        if not isinstance(record, Mapping):
            raise MetadataError(f"a parameter is described by an object, got {type(record).__name__}")
        wrong = sorted(set(record) - {"name", "dtype", "shape", "owners", "mesh_shape", "placements"})
        wrong += sorted({"name", "dtype", "shape"} - set(record))
        if wrong:
            raise MetadataError(
                f"the description of a parameter has unknown or missing keys: {', '.join(map(str, wrong))}"
            )
        lists = {key: record[key] for key in ("shape", "owners", "mesh_shape", "placements") if key in record}
        for key, value in lists.items():
            if not isinstance(value, list | tuple):
                raise MetadataError(f"parameter {record['name']!r} has a {key} that is no list: {value!r}")
        placements = lists.get("placements")
        return cls(
            record["name"],
            dtype_from_name(record["dtype"]),
            tuple(lists["shape"]),
            owners=tuple(lists["owners"]) if "owners" in lists else None,
            mesh_shape=tuple(lists["mesh_shape"]) if "mesh_shape" in lists else None,
            placements=None
            if placements is None
            else tuple(Replicate() if one is None else Shard(one) for one in placements),
        )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as it travels, e.g. `"bfloat16"`."""
    return str(dtype).rpartition(".")[2]


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        MetadataError: There is none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise MetadataError(f"{name!r} is not the name of a torch dtype")
    return dtype


def metadata_digest(metadata: Sequence[ParamMeta]) -> str:
    """SHA-256 in hex of the metadata as compact JSON with sorted keys; the order of parameters counts."""
    text = json.dumps([meta.to_json() for meta in metadata], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_metadata(metadata: Sequence[ParamMeta]) -> None:
    """Refuse metadata that names a parameter twice.

    Raises:
        MetadataError: It does.
    """
    seen: set[str] = set()
    for meta in metadata:
        if meta.name in seen:
            raise MetadataError(f"parameter {meta.name!r} is declared twice", parameter=meta.name)
        seen.add(meta.name)


def layerwise_groups(names: Sequence[str]) -> list[list[str]]:
    """Group names by layer: what precedes the layers, then each layer, then the rest.

    The layer of a name is its prefix and number up to the first segment that is all digits. Stacks come in the order
    in which their prefix appears first, layers by number; inside a group the order is that of `names`.
    """
    before: list[str] = []
    after: list[str] = []
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        segments = name.split(".")
        at = next((place for place, segment in enumerate(segments) if segment.isdigit()), None)
        if at is not None:
            stacks.setdefault(".".join(segments[:at]), {}).setdefault(int(segments[at]), []).append(name)
        elif stacks:
            after.append(name)
        else:
            before.append(name)
    layers = [stack[number] for stack in stacks.values() for number in sorted(stack)]
    return [group for group in (before, *layers, after) if group]
