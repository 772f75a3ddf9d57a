"""From what a recorder noted to a LoadPlan: units, normal forms, shadowing, and what follows from opaque modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from weightwire.layout import ParamMeta
from weightwire.load_plan import Axes, Copy, Fill, LoadPlan, Opaque, merged, normal_pair, once
from weightwire.region import Region
from weightwire.shadowing import Write, settle, union_size
from weightwire.twin_slots import Slots

Place = tuple[int, Axes, Axes]
"""Offset, sizes and strides: a Region before it is worth an object."""


class Noted(NamedTuple):
    """One write as it was seen, in elements of the dtype in which it was done.

    Attributes:
        source: Number of the source; -1 for a constant.
        source_place: Where in it; of a constant, the same as `target_place`.
        target: Number of the target.
        target_place: Where in its storage.
        itemsize: Bytes of those elements.
        bits: Of a constant, in hex.
    """

    source: int
    source_place: Place
    target: int
    target_place: Place
    itemsize: int
    bits: str = ""


def place_of(tensor: Tensor) -> Place:
    """Where a strided tensor lies in its storage, in its own elements."""
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


@dataclass(eq=False, slots=True)
class Cause:
    """Why a module is opaque, and the sources that are known to go into it."""

    reason: str
    sources: set[str] = field(default_factory=set)


class _Line(NamedTuple):
    noted: Noted
    write: Write
    source_region: Region


def in_units(region: Region, have: int, want: int) -> Region | None:
    """A region in elements of `have` bytes as one in elements of `want` bytes; None if it cuts through elements."""
    if have == want:
        return region
    if have > want:
        factor = have // want
        strides = tuple(stride * factor for stride in region.strides)
        return Region(region.offset * factor, (*region.sizes, factor), (*strides, 1))
    factor = want // have
    if not region.sizes or region.strides[-1] != 1:
        return None
    numbers = (region.offset, region.sizes[-1], *region.strides[:-1])
    if any(number % factor for number in numbers):
        return None
    sizes = (*region.sizes[:-1], region.sizes[-1] // factor)
    return Region(region.offset // factor, sizes, (*(stride // factor for stride in region.strides[:-1]), 1))


class Assembly:
    """Makes one plan.

    Args:
        slots: The twin's places.
        sources: The checkpoint.
        noted: The writes, in record order.
        causes: By module; gets more.
        moved: The sources of which anything was used.
    """

    def __init__(
        self,
        slots: Slots,
        sources: Sequence[ParamMeta],
        noted: Sequence[Noted],
        causes: dict[str, Cause],
        moved: set[str],
    ) -> None:
        self._slots, self._sources, self._noted = slots, sources, noted
        self._causes, self._moved = causes, moved
        self._lines: dict[int, list[_Line]] = {}
        self._itemsizes = [meta.dtype.itemsize for meta in sources]
        self._units = [target.dtype.itemsize for target in slots.targets]

    def plan(self) -> LoadPlan:
        """The plan."""
        lines = [line for noted in self._noted if (line := self._line(noted)) is not None]
        for line in lines:
            self._lines.setdefault(line.noted.target, []).append(line)
        for target, written in self._lines.items():
            settle([line.write for line in written])
            for line in written:
                if line.write.tangled:
                    self._cause(target, "writes overlap in part", line.noted)
        opaque = self._opaque()
        kept = [line for line in lines if self._slots.owners[line.noted.target] not in self._causes]
        known = {name for one in opaque for name in one.sources}
        return LoadPlan(
            sources=tuple(self._sources),
            targets=tuple(self._slots.targets),
            copies=tuple(self._copy(line) for line in kept if line.noted.source >= 0 and not line.write.shadowed),
            fills=tuple(self._fill(line) for line in kept if line.noted.source < 0 and not line.write.shadowed),
            opaque=opaque,
            shadowed=self._shadowed(kept, known),
            unmoved=tuple(m.name for m in self._sources if m.name not in self._moved and m.name not in known),
            unfilled=tuple(self._unfilled()),
        )

    def _line(self, noted: Noted) -> _Line | None:
        """A write in elements of its source and target, or None where there are no such elements."""
        unit, constant = self._units[noted.target], noted.source < 0
        if (self._itemsizes[noted.source] if not constant else noted.itemsize) != unit:
            self._cause(noted.target, "elements of another size are written into it", noted)
            return None
        (source_offset, sizes, source_strides), (target_offset, _, target_strides) = (
            noted.source_place,
            noted.target_place,
        )
        sizes, source_strides, target_strides = merged(sizes, source_strides, target_strides)
        source = Region(source_offset, sizes, source_strides)
        target = Region(target_offset, sizes, target_strides)
        if noted.itemsize != unit:
            first, second = (in_units(region, noted.itemsize, unit) for region in (source, target))
            if first is None or second is None:
                self._cause(noted.target, "a copy cuts through elements", noted)
                return None
            source, target = normal_pair(first, second)
        return _Line(noted, Write(target, constant), source)

    def _cause(self, target: int, reason: str, noted: Noted) -> None:
        cause = self._causes.setdefault(self._slots.owners[target], Cause(reason))
        if noted.source >= 0:
            cause.sources.add(self._sources[noted.source].name)

    def _opaque(self) -> tuple[Opaque, ...]:
        """The opaque modules; what goes into one of their tensors has to come in full."""
        for noted in self._noted if self._causes else ():
            if self._slots.owners[noted.target] in self._causes:
                self._cause(noted.target, "", noted)
        order = {meta.name: index for index, meta in enumerate(self._sources)}
        return tuple(
            Opaque(module, cause.reason, tuple(sorted(cause.sources, key=order.__getitem__)))
            for module, cause in sorted(self._causes.items())
        )

    def _copy(self, line: _Line) -> Copy:
        source, target = self._sources[line.noted.source], self._slots.targets[line.noted.target]
        return Copy(source.name, line.source_region, target.name, line.write.region)

    def _fill(self, line: _Line) -> Fill:
        return Fill(self._slots.targets[line.noted.target].name, line.write.region, line.noted.bits)

    def _shadowed(self, kept: Iterable[_Line], full: set[str]) -> tuple[tuple[str, Region], ...]:
        pairs = [
            (self._sources[line.noted.source].name, once(line.source_region))
            for line in kept
            if line.write.shadowed and not line.write.constant
        ]
        return tuple(dict.fromkeys(pair for pair in pairs if pair[0] not in full))

    def _unfilled(self) -> Iterable[tuple[str, int]]:
        for index, target in enumerate(self._slots.targets):
            if self._slots.owners[index] in self._causes:
                continue
            views = [Region(view.offset, view.shape, view.strides) for view in target.views if 0 not in view.shape]
            live = [line.write for line in self._lines.get(index, ()) if not line.write.shadowed]
            regions = [write.region for write in live]
            if len(views) == 1 and not any(write.constant for write in live):
                count = views[0].numel - sum(region.numel for region in regions)
            else:
                count = union_size(views) - union_size(regions)
            if count > 0:
                yield target.name, count
