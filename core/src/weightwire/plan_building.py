"""Load plans that need no recording: tensors that land whole, boxes of them, and pieces on their way to a loader."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch

from weightwire.layout import Box, ParamMeta
from weightwire.load_plan import Copy, LoadPlan, Target, View, once
from weightwire.region import Region
from weightwire.region_boxes import row_major, whole


def plan_of_boxes(boxes: Iterable[tuple[ParamMeta, Box | None]]) -> LoadPlan:
    """Each tensor, or a box of it, lands contiguous in a target of its own, which has its name.

    Args:
        boxes: Tensors, and the part of each that is wanted; None is all of it.
    """
    pairs = list(boxes)
    sources = tuple(meta if meta.owners is None else ParamMeta(meta.name, meta.dtype, meta.shape) for meta, _ in pairs)
    parts = [(meta, whole(meta.shape) if box is None else region_of_box(meta.shape, box)) for meta, box in pairs]
    return LoadPlan(
        sources=sources,
        targets=tuple(_target(meta.name, meta.dtype, part.sizes) for meta, part in parts),
        copies=tuple(_landing_copy(meta.name, part, meta.name) for meta, part in parts if part.numel),
        unmoved=tuple(meta.name for meta, part in parts if not part.numel),
    )


def plan_of_pieces(recorded: LoadPlan) -> LoadPlan:
    """Every piece that a recorded plan needs lands contiguous in a target of its own, and so does each tensor in full.

    For hosts that feed their loader once everything is here, see `recorded_install.feed`. What the recorded plan says
    of opaque modules is kept; constants and what is not filled are the loader's affair.

    Returns:
        A plan whose targets are those of `recorded.pieces`, then those of `recorded.full_sources`, in their order.
    """
    numbers = itertools.count()
    parts = [*recorded.pieces, *((name, whole(recorded.by_name[name].shape)) for name in recorded.full_sources)]
    named = [(name, part, f"{name}[{next(numbers)}]") for name, part in parts]
    return LoadPlan(
        sources=recorded.sources,
        targets=tuple(_target(target, recorded.by_name[name].dtype, part.sizes) for name, part, target in named),
        copies=tuple(_landing_copy(name, part, target) for name, part, target in named if part.numel),
        opaque=recorded.opaque,
        unmoved=recorded.unmoved,
    )


def _target(name: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> Target:
    return Target(name, dtype, math.prod(sizes), (View(name, 0, sizes, row_major(sizes)),))


def _landing_copy(source: str, part: Region, target: str) -> Copy:
    # A region of a box reads no element twice: `once` is its normal form.
    normal = once(part)
    return Copy(source, normal, target, whole(normal.sizes))


def region_of_box(shape: Sequence[int], box: Box) -> Region:
    """The elements of a box of a contiguous tensor of shape `shape`, in order."""
    strides = row_major(shape)
    offset = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    return Region(offset, box.shape, strides)
