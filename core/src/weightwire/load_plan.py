"""What a model's own loader does with a checkpoint, written down once: which elements go where.

A plan speaks of elements, not of layers: a copy is a pair of regions of equal extents, one of a checkpoint tensor and
one of a target's storage. Its copies write disjoint elements, so they may be carried out in any order, by anyone.
What cannot be written down so is opaque: it takes full tensors through the loader.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Self

import torch

from weightwire.layout import ParamMeta
from weightwire.region import Region
from weightwire.region_boxes import merge_axes

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A named parameter or buffer as a view of its storage: offset and strides in its own elements."""

    name: str
    offset: int
    shape: Axes
    strides: Axes


@dataclass(frozen=True, slots=True)
class Target:
    """A storage of the model that has parameters or buffers in it.

    Attributes:
        name: Its first name; copies speak of it by this one.
        dtype: The dtype of that tensor; regions count in its elements.
        size: Elements of the storage.
        views: Every tensor in it, the one called `name` first: several where parameters are tied or share a buffer.
    """

    name: str
    dtype: torch.dtype
    size: int
    views: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a checkpoint tensor and where they land, in one order.

    Attributes:
        source: Name of the checkpoint tensor.
        source_region: In elements of that tensor, which is contiguous; a stride of 0 reads one element many times.
        target: Name of a target.
        target_region: In elements of the target's storage, each once; of the same extents and the same bytes.
    """

    source: str
    source_region: Region
    target: str
    target_region: Region


@dataclass(frozen=True, slots=True)
class Fill:
    """A constant that the loader writes without any checkpoint tensor, as padding: before the copies, in order.

    Attributes:
        target: Name of a target.
        region: In elements of its storage.
        bits: The element's bytes in hex, in memory order.
    """

    target: str
    region: Region
    bits: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """A module whose loading is not written down.

    Attributes:
        module: Its path in the model; `""` is the model itself.
        reason: The first thing seen that no region expresses.
        sources: The checkpoint tensors that the loader must get in full for it; none where it only has to run.
    """

    module: str
    reason: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class LoadPlan:
    """How one rank's loader turns checkpoint tensors into parameters; equal loads have equal digests.

    Attributes:
        sources: The checkpoint tensors, in the order in which the loader gets them, without owners.
        targets: The storages of the model.
        copies: In record order, in normal form; their target regions are disjoint, and later copies have shadowed
            earlier ones. None goes into an opaque module.
        fills: Done before all copies.
        opaque: By module.
        shadowed: Copies that the loader makes and a later one undoes; no bytes are needed for them.
        unmoved: Sources of which nothing was used.
        unfilled: Targets with elements that nothing writes, opaque modules aside, and how many: padding and buffers.
    """

    sources: tuple[ParamMeta, ...]
    targets: tuple[Target, ...] = ()
    copies: tuple[Copy, ...] = ()
    fills: tuple[Fill, ...] = ()
    opaque: tuple[Opaque, ...] = ()
    shadowed: tuple[tuple[str, Region], ...] = ()
    unmoved: tuple[str, ...] = ()
    unfilled: tuple[tuple[str, int], ...] = ()

    @cached_property
    def by_name(self) -> dict[str, ParamMeta]:
        """The sources by name."""
        return {meta.name: meta for meta in self.sources}

    @cached_property
    def full_sources(self) -> tuple[str, ...]:
        """The sources that have to come in full, in declared order."""
        wanted = {name for one in self.opaque for name in one.sources}
        return tuple(meta.name for meta in self.sources if meta.name in wanted)

    @property
    def opaque_bytes(self) -> int:
        """What those weigh."""
        return sum(self.by_name[name].nbytes for name in self.full_sources)

    @cached_property
    def pieces(self) -> tuple[tuple[str, Region], ...]:
        """What has to come besides: distinct pieces of sources, each element once (see `once`), in record order."""
        full = set(self.full_sources)
        pairs = ((copy.source, once(copy.source_region)) for copy in self.copies if copy.source not in full)
        return tuple(dict.fromkeys(pairs))

    @property
    def piece_bytes(self) -> int:
        """What those weigh; regions that overlap without being equal count twice."""
        return sum(region.numel * self.by_name[name].dtype.itemsize for name, region in self.pieces)

    def to_json(self) -> str:
        """Canonical JSON: equal plans give equal text."""
        return self._text

    @cached_property
    def _text(self) -> str:
        from weightwire.load_plan_json import write

        return json.dumps(write(self), separators=(",", ":"), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild what `to_json` wrote.

        Raises:
            MessageError: It is no such text: a key is unknown, missing or of the wrong type, or a region reaches out
                of its tensor.
        """
        from weightwire.load_plan_json import read

        return cls(**read(text))

    def digest(self) -> str:
        """SHA-256 of the JSON, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """The coverage in JSON types, for reports: counts, bytes, what is opaque and why, what never moved."""
        return {
            "sources": len(self.sources),
            "copies": len(self.copies),
            "piece_bytes": self.piece_bytes,
            "opaque": [
                {"module": one.module, "reason": one.reason, "sources": list(one.sources)} for one in self.opaque
            ],
            "opaque_bytes": self.opaque_bytes,
            "unmoved": list(self.unmoved),
            "unfilled": dict(self.unfilled),
        }


merged = lru_cache(maxsize=4096)(merge_axes)
"""`merge_axes`, remembered: a model repeats few shapes many times."""


def normal_pair(source: Region, target: Region) -> tuple[Region, Region]:
    """The normal form of two regions of equal extents: drop axes of size 1, merge axes that merge on both sides."""
    assert source.sizes == target.sizes, (source, target)
    sizes, firsts, seconds = merged(source.sizes, source.strides, target.strides)
    return Region(source.offset, sizes, firsts), Region(target.offset, sizes, seconds)


@lru_cache(maxsize=4096)
def _repeats_dropped(sizes: Axes, strides: Axes) -> tuple[Axes, Axes]:
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if stride]
    alone = tuple(stride for _, stride in kept)
    merged_sizes, merged_strides = merged(tuple(size for size, _ in kept), alone)
    return merged_sizes, merged_strides


def once(region: Region) -> Region:
    """A region without axes of stride 0 or size 1, merged: what of a source has to come, each element once.

    A piece that arrives holds these elements in row-major order, contiguous.
    """
    sizes, strides = _repeats_dropped(region.sizes, region.strides)
    return Region(region.offset, sizes, strides)


def repeated(region: Region) -> Axes:
    """Strides that read `region`, repeated elements too, out of the contiguous piece that `once(region)` names."""
    strides: list[int] = []
    step = 1
    for size, stride in zip(reversed(region.sizes), reversed(region.strides), strict=True):
        strides.append(step if stride else 0)
        step *= size if stride else 1
    return tuple(reversed(strides))


def last_element(region: Region) -> int:
    """The largest index that a region with elements reads."""
    return region.offset + sum((size - 1) * stride for size, stride in zip(region.sizes, region.strides, strict=True))
