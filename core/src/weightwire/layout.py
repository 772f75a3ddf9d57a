"""What a parameter is and how it lies across ranks: the arithmetic every plan is made from.

A mesh is a row-major grid of trainer ranks. Along each of its axes a parameter is replicated or split the
way `torch.chunk` splits, outer axis first, so that the piece of one rank is a `Box`: an interval in each
dimension. All of it is a pure function of metadata: every rank computes the same answer without asking.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch

from weightwire.errors import MetadataError


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along this mesh axis holds the whole extent."""


@dataclass(frozen=True, slots=True)
class Shard:
    """This mesh axis splits one tensor dimension the way `torch.chunk` does.

    10 rows over 4 ranks are 3, 3, 3 and 1; 5 over 4 are 2, 2, 1 and 0. Nothing is padded.

    Attributes:
        dim: The dimension that is split, counted from 0.
    """

    dim: int


Placement = Replicate | Shard


def cut(interval: tuple[int, int], parts: int, index: int) -> tuple[int, int]:
    """Piece `index` of `interval` split into `parts` pieces, as `torch.chunk` would.

    Args:
        interval: Half-open, `start <= stop`.
        parts: How many pieces, at least 1.
        index: Which piece, from 0.

    Returns:
        A half-open interval; an empty one at the end of `interval` where `torch.chunk` makes fewer pieces.
    """
    start, stop = interval
    assert start <= stop and 0 <= index < parts, (interval, parts, index)
    step = -((start - stop) // parts)
    first = min(start + index * step, stop)
    return first, min(first + step, stop)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor: the half-open interval `[start, stop)` in every dimension.

    All empty boxes with the same number of dimensions are equal: they become `[0, 0)` in each. The only box of
    a 0-d tensor has one element.

    Raises:
        MetadataError: `start` and `stop` differ in length, or an interval is negative.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(
            not 0 <= a <= b for a, b in zip(self.start, self.stop, strict=False)
        ):
            raise MetadataError(f"there is no box from {self.start} to {self.stop}")
        if any(a == b for a, b in zip(self.start, self.stop, strict=True)):
            nowhere = (0,) * len(self.start)
            object.__setattr__(self, "start", nowhere)
            object.__setattr__(self, "stop", nowhere)

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent in every dimension; all zeros when empty."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def empty(self) -> bool:
        """Whether it has no element."""
        return self.numel == 0

    def slices(self) -> tuple[slice, ...]:
        """The index that takes this box out of a full tensor: `tensor[box.slices()]` is a view."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box:
        """The elements that are in both boxes, which have the same number of dimensions."""
        assert len(self.start) == len(other.start), (self, other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, tuple(map(max, start, stop)))


def dtype_name(dtype: torch.dtype) -> str:
    """The name a dtype travels under: `"bfloat16"` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


_DTYPES: Final = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype that `dtype_name` wrote.

    Raises:
        MetadataError: This torch has no dtype of that name.
    """
    try:
        return _DTYPES[name]
    except (KeyError, TypeError):
        raise MetadataError(f"this torch ({torch.__version__}) has no dtype {name!r}") from None


def _integers(value: object, what: str, name: str, *, least: int) -> tuple[int, ...]:
    """`value` as a tuple of true integers of at least `least`; booleans and floats are refused."""
    if isinstance(value, Sequence) and all(type(size) is int and size >= least for size in value):
        return tuple(value)
    raise MetadataError(
        f"parameter {name!r} {what} must be a sequence of integers >= {least}, got {value!r}", parameter=name
    )


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One parameter of the whole model: name, wire dtype, full shape, who owns it and how it is laid out.

    Metadata is identical on every trainer rank, ownership included; every plan is computed from it alone.
    Placements that are all `Replicate` are the same as none and become None.

    Attributes:
        name: The name in the checkpoint, as the worker's model knows it.
        dtype: The dtype that travels.
        shape: The full shape, of non-negative integers.
        owners: The trainer ranks that own it, in mesh order; None means every rank, each with all of it.
        mesh_shape: Row-major shape of the mesh over `owners`; `(len(owners),)` unless given.
        placements: A `Replicate` or `Shard` for each mesh axis, outer axis first; None means replicated.

    Raises:
        MetadataError: A field that cannot be, naming the parameter.
        TypeError: A placement that is neither `Replicate` nor `Shard`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Placement, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise MetadataError(f"a parameter's name must be a non-empty string, got {self.name!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise self._error(f"dtype must be a torch.dtype, got {self.dtype!r}")
        object.__setattr__(self, "shape", _integers(self.shape, "shape", self.name, least=0))
        if self.owners is not None:
            self._check_mesh()
        elif self.mesh_shape is not None or self.placements is not None:
            raise self._error("declares a mesh or placements without owners")

    def _error(self, problem: str) -> MetadataError:
        return MetadataError(f"parameter {self.name!r} {problem}", parameter=self.name)

    def _check_mesh(self) -> None:
        owners = _integers(self.owners, "owners", self.name, least=0)
        if not owners or len(set(owners)) != len(owners):
            raise self._error(f"owners must be distinct non-negative ranks, got {self.owners!r}")
        given = (len(owners),) if self.mesh_shape is None else self.mesh_shape
        mesh_shape = _integers(given, "mesh_shape", self.name, least=1)
        if math.prod(mesh_shape) != len(owners):
            raise self._error(f"mesh_shape {mesh_shape} does not cover its {len(owners)} owners")
        object.__setattr__(self, "owners", owners)
        object.__setattr__(self, "mesh_shape", mesh_shape)
        if self.placements is not None:
            placements = tuple(self.placements)
            self._check_placements(placements, mesh_shape)
            sharded = any(isinstance(placement, Shard) for placement in placements)
            object.__setattr__(self, "placements", placements if sharded else None)

    def _check_placements(self, placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> None:
        if len(placements) != len(mesh_shape):
            raise self._error(f"has {len(placements)} placements for a {len(mesh_shape)}-D mesh")
        for placement in placements:
            if isinstance(placement, Shard):
                if type(placement.dim) is not int or not 0 <= placement.dim < len(self.shape):
                    raise self._error(f"shards dim {placement.dim!r} of a {len(self.shape)}-D tensor")
            elif not isinstance(placement, Replicate):
                raise TypeError(f"parameter {self.name!r} placement {placement!r} is neither Replicate nor Shard")

    @property
    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the full tensor in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def first_owner(self) -> int:
        """The trainer rank that sends the parameter when one rank sends all of it."""
        return self.owners[0] if self.owners is not None else 0

    def owned_by(self, rank: int) -> bool:
        """Whether trainer rank `rank` holds the parameter or a piece of it."""
        return self.owners is None or rank in self.owners

    def _intervals(self, rank: int) -> list[tuple[int, int]]:
        intervals = [(0, size) for size in self.shape]
        if not self.owned_by(rank):
            raise self._error(f"is not owned by trainer rank {rank}; its owners are {self.owners}")
        if self.owners is None or self.mesh_shape is None or self.placements is None:
            return intervals
        position, inner = self.owners.index(rank), len(self.owners)
        for size, placement in zip(self.mesh_shape, self.placements, strict=True):
            inner //= size
            coordinate, position = divmod(position, inner)
            if isinstance(placement, Shard):
                intervals[placement.dim] = cut(intervals[placement.dim], size, coordinate)
        return intervals

    def box(self, rank: int) -> Box:
        """The region of the full tensor that trainer rank `rank` holds.

        Raises:
            MetadataError: The rank does not own the parameter.
        """
        intervals = self._intervals(rank)
        return Box(tuple(a for a, _ in intervals), tuple(b for _, b in intervals))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the piece that `WeightSource.iter_local` yields on trainer rank `rank`.

        An empty piece keeps its other extents, `(0, 3)` say, as torch's local tensors do.

        Raises:
            MetadataError: The rank does not own the parameter.
        """
        return tuple(b - a for a, b in self._intervals(rank))

    def to_json(self) -> dict[str, Any]:
        """This as JSON types, without the keys that are None; a placement is the dim it shards, or None."""
        dtype = dtype_name(self.dtype)
        record: dict[str, Any] = {"name": self.name, "dtype": dtype, "shape": list(self.shape)}
        if self.owners is not None and self.mesh_shape is not None:
            record |= {"owners": list(self.owners), "mesh_shape": list(self.mesh_shape)}
        if self.placements is not None:
            record["placements"] = [p.dim if isinstance(p, Shard) else None for p in self.placements]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild what `to_json` wrote.

        Raises:
            MetadataError: A key is unknown, missing or of the wrong type, or values contradict each other.
        """
        if not isinstance(record, Mapping):
            raise MetadataError(f"a parameter's metadata must be an object, got {record!r}")
        where = f"metadata of {record.get('name')!r}"
        unknown = sorted(map(str, record.keys() - _REQUIRED - _LISTS))
        missing = sorted(_REQUIRED - record.keys())
        if unknown or missing:
            raise MetadataError(f"{where}: unknown keys {unknown}, missing keys {missing}")
        for key in sorted(_LISTS & record.keys()):
            if not isinstance(record[key], list | tuple):
                raise MetadataError(f"{where}: {key} must be a list, got {record[key]!r}")
        fields = dict(record)
        try:
            fields["dtype"] = dtype_from_name(record["dtype"])
        except MetadataError as error:
            raise MetadataError(f"{where}: {error.message}") from None
        if "placements" in fields:
            fields["placements"] = [Replicate() if dim is None else Shard(dim) for dim in fields["placements"]]
        return cls(**fields)


_REQUIRED: Final = frozenset({"name", "dtype", "shape"})
_LISTS: Final = frozenset({"shape", "owners", "mesh_shape", "placements"})


def total_bytes(metadata: Sequence[ParamMeta]) -> int:
    """Size of all parameters together."""
    return sum(meta.nbytes for meta in metadata)


def metadata_digest(metadata: Sequence[ParamMeta]) -> str:
    """The SHA-256, in hex, of the list in order: equal in every process that declares the same model."""
    records = [meta.to_json() for meta in metadata]
    return hashlib.sha256(json.dumps(records, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_metadata(metadata: Sequence[ParamMeta]) -> None:
    """Refuse metadata that declares one name twice.

    Raises:
        MetadataError: Names the first parameter that is declared again, or an item that is no `ParamMeta`.
    """
    seen: dict[str, int] = {}
    for index, meta in enumerate(metadata):
        if not isinstance(meta, ParamMeta):
            raise MetadataError(f"metadata at index {index} is a {type(meta).__name__}, not a ParamMeta")
        if meta.name in seen:
            places = f"at index {seen[meta.name]} and index {index}"
            raise MetadataError(f"parameter {meta.name!r} is declared twice, {places}", parameter=meta.name)
        seen[meta.name] = index


def _layer(name: str) -> tuple[str, int] | None:
    """The prefix and number of a name's first all-digit segment: `("model.layers", 3)`."""
    segments = name.split(".")
    for position, segment in enumerate(segments):
        if segment.isascii() and segment.isdigit():
            return ".".join(segments[:position]), int(segment)
    return None


def layerwise_groups(names: Iterable[str]) -> list[list[str]]:
    """Parameter names grouped by layer, in the order in which a model runs them.

    A layer is what shares everything up to and including the first all-digit segment of a name. Names without
    one form a group in front if they come before every layer, and one group at the end otherwise. Stacks of
    layers follow the order in which they first appear, the layers of a stack their numbers, and names inside
    a group the input. (The rule of vLLM's `layerwise_groups`.)

    Returns:
        Non-empty groups that together hold every name once.
    """
    before: list[str] = []
    after: list[str] = []
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        layer = _layer(name)
        if layer is not None:
            stacks.setdefault(layer[0], {}).setdefault(layer[1], []).append(name)
        else:
            (after if stacks else before).append(name)
    layers = [stack[number] for stack in stacks.values() for number in sorted(stack)]
    return [group for group in (before, *layers, after) if group]
