"""Patches of a plain module: a parameter, or the part of it that is here, lies with some strides in some memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from weightwire.errors import UpdateRefused
from weightwire.inventory import Entry
from weightwire.layout import Box
from weightwire.load_plan import Copy, LoadPlan, last_element, normal_pair
from weightwire.module_update import Chosen, Update
from weightwire.patching import CheckedPatch, ReadyPatch
from weightwire.plan_building import region_of_box
from weightwire.plan_patching import PatchRoutes
from weightwire.region import Region


def memory_of(entry: Entry) -> Tensor:
    """The live tensor to write, as `Entry.local`, of which there are views in every mode.

    There are none of a detached one that was made in inference mode and has been rebound.
    """
    return entry.tensors[0].data if entry.box is None else entry.local


def not_patchable(entry: Entry) -> str | None:
    """Why no patch can be applied to an entry; None if one can."""
    return None if entry.copied_because in (None, "DTensor") else f"cannot be applied to a {entry.copied_because}"


def unpatchable(chosen: Mapping[str, Chosen]) -> str | None:
    """See `WeightSink.unpatchable`; casts are the same for a patch, but what they leave cannot be compared."""
    for name, (entry, meta) in chosen.items():
        if (words := not_patchable(entry)) is not None:
            return f"a patch of {name!r} {words}"
        if meta.dtype != entry.tensors[0].dtype:
            return f"{name!r} is cast from {meta.dtype} to {entry.tensors[0].dtype}"
    return None


def checked_patches(update: Update) -> list[CheckedPatch]:
    """The patches of an update, of the model's dtypes.

    Raises:
        UpdateRefused: One does not fit.
    """
    for name in update.held.names:
        if (words := not_patchable(update.chosen[name][0])) is not None:
            raise UpdateRefused(f"the patch of {name!r} {words}", parameter=name)
    checked = update.held.checked({name: meta for name, (_, meta) in update.chosen.items()})
    return [_cast(patch, update.chosen[patch.name][0].tensors[0].dtype) for patch in checked]


def _cast(patch: CheckedPatch, dtype: torch.dtype) -> CheckedPatch:
    return patch if patch.values.dtype == dtype else replace(patch, values=patch.values.to(dtype))


def ready_in(patch: CheckedPatch, entry: Entry, target: Tensor) -> list[ReadyPatch]:
    """A patch for the memory of `target`: the local tensor of `entry`, or what stands in for it."""
    if not target.numel():
        return []
    routes, length = _routes(patch.name, patch.shape, entry.box, tuple(target.shape), target.stride())
    return routes.ready([patch], {patch.name: target.as_strided((length,), (1,))})


@lru_cache(maxsize=1 << 14)
def _routes(
    name: str, shape: tuple[int, ...], box: Box | None, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[PatchRoutes, int]:
    """The way from a parameter, or a box of it, into memory of these strides, and the elements that it spans.

    The same in each round, and dearer than a small patch.
    """
    where = Region(0, sizes, strides)
    part = Box((0,) * len(shape), shape) if box is None else box
    source, landing = normal_pair(region_of_box(shape, part), where)
    return PatchRoutes([Copy(name, source, name, landing)]), last_element(where) + 1


def outcome(
    plan: LoadPlan, entries: Mapping[str, Entry], patches: Sequence[CheckedPatch]
) -> Iterator[tuple[str, Tensor]]:
    """See `WeightSink.outcome`."""

    def flat(name: str) -> Tensor:
        return memory_of(entries[name]).contiguous().view(-1)

    return PatchRoutes(plan.copies).outcome(patches, (target.name for target in plan.targets), flat)
