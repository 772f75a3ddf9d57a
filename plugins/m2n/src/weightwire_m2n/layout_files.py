"""How both sides of a reshard lie, as two JSON files, so that it can be planned where neither side runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from weightwire.errors import MessageError, MetadataError
from weightwire.layout import ParamMeta, check_metadata
from weightwire.load_plan import LoadPlan

SOURCE_FILE: Final = "source.json"
"""What the source layout is called in a directory that holds both."""

WORKERS_FILE: Final = "workers.json"
"""What the worker layouts are called in it."""

_VERSION: Final = 1
_MOST_TRAINERS: Final = 1 << 20
_SOURCE: Final = "source layout"
_WORKERS: Final = "worker layouts"


def write_source_layout(path: str | os.PathLike[str], metadata: Sequence[ParamMeta], trainers: int) -> None:
    """Write how the parameters lie across the trainer ranks; the file is replaced as a whole.

    Args:
        path: Of the file.
        metadata: The parameters, in order.
        trainers: How many trainer ranks there are.
    """
    record = {"trainers": trainers, "parameters": [meta.to_json() for meta in metadata]}
    _replace(Path(path), json.dumps({"weightwire": _SOURCE, "version": _VERSION} | record))


def write_worker_layouts(path: str | os.PathLike[str], plans_by_rank: Sequence[LoadPlan]) -> None:
    """Write what every worker rank loads, equal plans once; the file is replaced as a whole.

    Args:
        path: Of the file.
        plans_by_rank: One for each worker rank.
    """
    distinct: dict[str, int] = {}
    plan_of = [distinct.setdefault(plan.to_json(), len(distinct)) for plan in plans_by_rank]
    head = json.dumps({"weightwire": _WORKERS, "version": _VERSION, "plan_of": plan_of})
    _replace(Path(path), f'{head[:-1]}, "plans": [{", ".join(distinct)}]}}')


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_source_layout(path: str | os.PathLike[str]) -> tuple[tuple[ParamMeta, ...], int]:
    """The parameters, and how many trainer ranks there are.

    Raises:
        MessageError: The file cannot be read, or is no source layout; names it.
    """
    record = _record(path, _SOURCE, {"trainers", "parameters"})
    trainers = record["trainers"]
    if type(trainers) is not int or not 1 <= trainers <= _MOST_TRAINERS:
        raise MessageError(f"{path}: trainers must be an integer from 1 to {_MOST_TRAINERS}, not {trainers!r}")
    try:
        metadata = tuple(ParamMeta.from_json(each) for each in _list(record["parameters"], "parameters"))
        check_metadata(metadata)
        for meta in metadata:
            if meta.owners is not None and max(meta.owners) >= trainers:
                raise MetadataError(
                    f"parameter {meta.name!r} is owned by trainer rank {max(meta.owners)}, and there are {trainers}"
                )
    except (ValueError, TypeError) as error:
        raise MessageError(f"{path}: {error}") from None
    return metadata, trainers


def read_worker_layouts(path: str | os.PathLike[str]) -> list[LoadPlan]:
    """What each worker rank loads; ranks that load alike share one object.

    Raises:
        MessageError: The file cannot be read, or holds no worker layouts; names it.
    """
    record = _record(path, _WORKERS, {"plans", "plan_of"})
    known: dict[str, LoadPlan] = {}
    plans = []
    try:
        for index, each in enumerate(_list(record["plans"], "plans")):
            try:
                plan = LoadPlan.from_json(json.dumps(each))
            except MessageError as error:
                raise MessageError(f"plan {index}: {error}") from None
            plans.append(known.setdefault(plan.digest(), plan))
        plan_of = _list(record["plan_of"], "plan_of")
        if not plan_of:
            raise ValueError("it has no worker rank")
        for rank, index in enumerate(plan_of):
            if type(index) is not int or not 0 <= index < len(plans):
                raise ValueError(f"worker rank {rank} has plan {index!r} of {len(plans)}")
    except ValueError as error:
        raise MessageError(f"{path}: {error}") from None
    return [plans[index] for index in plan_of]


def _record(path: str | os.PathLike[str], kind: str, keys: set[str]) -> Mapping[str, Any]:
    try:
        record = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise MessageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{path} is no JSON: {error}") from None
    if not isinstance(record, dict) or record.get("weightwire") != kind:
        found = record.get("weightwire") if isinstance(record, dict) else None
        raise MessageError(f"{path} is no {kind}" + (f", but {found}" if isinstance(found, str) else ""))
    if record.get("version") != _VERSION:
        raise MessageError(f"{path}: version {record.get('version')!r} is not {_VERSION}: upgrade weightwire")
    expected = {"weightwire", "version", *keys}
    if record.keys() != expected:
        raise MessageError(f"{path}: its keys must be {sorted(expected)}, not {sorted(record)}")
    return record


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list, not {value!r}"[:200])
    return value


def check_layouts(metadata: Sequence[ParamMeta], plans_by_rank: Sequence[LoadPlan]) -> None:
    """Refuse two sides that are not of one model.

    Raises:
        MetadataError: A worker rank reads a tensor that the trainers do not have, or that has another dtype or shape.
    """
    known = {meta.name: meta for meta in metadata}
    checked: set[int] = set()
    for rank, plan in enumerate(plans_by_rank):
        if id(plan) in checked:
            continue
        checked.add(id(plan))
        for name in dict.fromkeys([*(copy.source for copy in plan.copies), *plan.full_sources]):
            wanted, meta = plan.by_name[name], known.get(name)
            if meta is None or (meta.dtype, meta.shape) != (wanted.dtype, wanted.shape):
                there = "do not have it" if meta is None else f"have {meta.dtype} {meta.shape}"
                raise MetadataError(
                    f"worker rank {rank} reads parameter {name!r}, {wanted.dtype} {wanted.shape}, and the trainers "
                    f"{there}: are the layouts of one model?",
                    parameter=name,
                )
