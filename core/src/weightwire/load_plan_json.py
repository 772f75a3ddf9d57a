"""A LoadPlan as JSON: tables of names and of axes, then five numbers a copy, so that 70,000 copies stay small."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from weightwire.errors import MessageError, MetadataError
from weightwire.layout import ParamMeta, check_metadata, dtype_from_name, dtype_name
from weightwire.load_plan import Axes, Copy, Fill, Opaque, Target, View, last_element
from weightwire.region import Region

if TYPE_CHECKING:
    from weightwire.load_plan import LoadPlan

_VERSION: Final = 1
_KEYS: Final = frozenset(
    ("version", "sources", "targets", "axes", "copies", "fills", "opaque", "shadowed", "unmoved", "unfilled")
)


class _Table:
    """Numbers its entries in the order in which they are first asked for."""

    def __init__(self) -> None:
        self.rows: dict[Any, int] = {}

    def index(self, row: object) -> int:
        return self.rows.setdefault(row, len(self.rows))


def write(plan: LoadPlan) -> dict[str, Any]:
    """The plan in JSON types."""
    source = {meta.name: index for index, meta in enumerate(plan.sources)}
    target = {one.name: index for index, one in enumerate(plan.targets)}
    axes = _Table()
    copies = [
        [
            source[copy.source],
            copy.source_region.offset,
            target[copy.target],
            copy.target_region.offset,
            axes.index((copy.source_region.sizes, copy.source_region.strides, copy.target_region.strides)),
        ]
        for copy in plan.copies
    ]
    return {
        "version": _VERSION,
        "sources": [[meta.name, dtype_name(meta.dtype), meta.shape] for meta in plan.sources],
        "targets": [
            [one.size, dtype_name(one.dtype), [[v.name, v.offset, v.shape, v.strides] for v in one.views]]
            for one in plan.targets
        ],
        "axes": list(axes.rows),
        "copies": copies,
        "fills": [[target[fill.target], *_spelled(fill.region), fill.bits] for fill in plan.fills],
        "opaque": [[one.module, one.reason, [source[name] for name in one.sources]] for one in plan.opaque],
        "shadowed": [[source[name], *_spelled(region)] for name, region in plan.shadowed],
        "unmoved": [source[name] for name in plan.unmoved],
        "unfilled": [[target[name], count] for name, count in plan.unfilled],
    }


def _spelled(region: Region) -> tuple[int, Axes, Axes]:
    return region.offset, region.sizes, region.strides


def read(text: str) -> dict[str, Any]:
    """The fields of the plan that `write` wrote as `text`.

    Raises:
        MessageError: See `LoadPlan.from_json`.
    """
    try:
        record = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise MessageError(f"Invalid load plan: it is no JSON: {error}") from None
    if not isinstance(record, dict) or record.keys() != _KEYS:
        keys = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise MessageError(f"Invalid load plan: its keys must be {sorted(_KEYS)}, not {keys}")
    if record["version"] != _VERSION:
        raise MessageError(f"Invalid load plan: version {record['version']!r} is not {_VERSION}: upgrade weightwire")
    try:
        return _Reader(record).fields()
    except (ValueError, TypeError, IndexError, MetadataError) as error:
        raise MessageError(f"Invalid load plan: {error}") from None


class _Reader:
    """Reads the tables first, and checks every number against them."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._record = record
        self._sources = [_source(*row) for row in _rows(record["sources"], 3)]
        check_metadata(self._sources)
        self._targets = [_target(*row) for row in _rows(record["targets"], 3)]
        if len({one.name for one in self._targets}) != len(self._targets):
            raise ValueError("a target is named twice")
        self._axes = [_axes(*row) for row in _rows(record["axes"], 3)]

    def fields(self) -> dict[str, Any]:
        record = self._record
        return {
            "sources": tuple(self._sources),
            "targets": tuple(self._targets),
            "copies": tuple(self._copy(*row) for row in _rows(record["copies"], 5)),
            "fills": tuple(self._fill(*row) for row in _rows(record["fills"], 5)),
            "opaque": tuple(self._opaque(*row) for row in _rows(record["opaque"], 3)),
            "shadowed": tuple(self._shadowed(*row) for row in _rows(record["shadowed"], 4)),
            "unmoved": tuple(self._source(index).name for index in _list(record["unmoved"])),
            "unfilled": tuple((self._target(index).name, _whole(n)) for index, n in _rows(record["unfilled"], 2)),
        }

    def _source(self, index: Any) -> ParamMeta:
        return self._sources[_whole(index)]

    def _target(self, index: Any) -> Target:
        return self._targets[_whole(index)]

    def _copy(self, source: Any, source_offset: Any, target: Any, target_offset: Any, axes: Any) -> Copy:
        sizes, source_strides, target_strides = self._axes[_whole(axes)]
        meta, to = self._source(source), self._target(target)
        if meta.dtype.itemsize != to.dtype.itemsize:
            raise ValueError(f"a copy of {meta.name!r} into {to.name!r}, whose elements have another size")
        read_from = _region(source_offset, sizes, source_strides, meta.numel, meta.name)
        return Copy(meta.name, read_from, to.name, _region(target_offset, sizes, target_strides, to.size, to.name))

    def _fill(self, target: Any, offset: Any, sizes: Any, strides: Any, bits: Any) -> Fill:
        to = self._target(target)
        if len(bytes.fromhex(bits)) != to.dtype.itemsize:
            raise ValueError(f"{bits!r} is no element of {to.name!r}")
        return Fill(to.name, _region(offset, _wholes(sizes), _wholes(strides), to.size, to.name), bits)

    def _opaque(self, module: Any, reason: Any, sources: Any) -> Opaque:
        return Opaque(_text(module), _text(reason), tuple(self._source(index).name for index in _list(sources)))

    def _shadowed(self, source: Any, offset: Any, sizes: Any, strides: Any) -> tuple[str, Region]:
        meta = self._source(source)
        return meta.name, _region(offset, _wholes(sizes), _wholes(strides), meta.numel, meta.name)


def _source(name: Any, dtype: Any, shape: Any) -> ParamMeta:
    return ParamMeta(_text(name), dtype_from_name(dtype), _wholes(shape))


def _target(size: Any, dtype: Any, rows: Any) -> Target:
    views = tuple(
        View(_text(name), _whole(offset), _wholes(shape), _wholes(strides))
        for name, offset, shape, strides in _rows(rows, 4)
    )
    if not views or any(len(view.shape) != len(view.strides) for view in views):
        raise ValueError(f"a target must have views, each with as many strides as sizes: {rows!r}")
    return Target(views[0].name, dtype_from_name(dtype), _whole(size), views)


def _axes(sizes: Any, firsts: Any, seconds: Any) -> tuple[Axes, Axes, Axes]:
    return _wholes(sizes), _wholes(firsts), _wholes(seconds)


def _region(offset: Any, sizes: Axes, strides: Axes, limit: int, name: str) -> Region:
    region = Region(_whole(offset), sizes, strides)
    if len(sizes) != len(strides) or 0 in sizes:
        raise ValueError(f"a region of {name!r} has sizes {sizes} and strides {strides}")
    if last_element(region) >= limit:
        raise ValueError(f"a region reaches element {last_element(region)} of {name!r}, which has {limit}")
    return region


def _rows(value: Any, length: int) -> list[list[Any]]:
    if not isinstance(value, list) or any(not isinstance(row, list) or len(row) != length for row in value):
        raise ValueError(f"a table must be a list of lists of {length}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {value!r}")
    return value


def _wholes(value: Any) -> Axes:
    return tuple(map(_whole, _list(value)))


def _typed(kind: type, what: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise ValueError(f"expected {what}, got {value!r}")
        return value

    return check


_whole: Final[Callable[[Any], int]] = _typed(int, "an integer of at least 0")
_text: Final[Callable[[Any], str]] = _typed(str, "a string")
