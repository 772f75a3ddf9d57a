"""What the loader of a live model does, found out on a copy, and whether regions of an update land in it directly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from weightwire.dtensor import is_dtensor
from weightwire.layout import ParamMeta
from weightwire.load_plan import LoadPlan
from weightwire.module_twin import meta_twin
from weightwire.piece_staging import PieceStaging
from weightwire.plan_patching import PatchRoutes
from weightwire.recorded_install import fill, storages
from weightwire.recording import record_loads

Structure = tuple[tuple[str, torch.dtype, torch.Size, tuple[int, ...], int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """What a model's loader does with a checkpoint.

    Attributes:
        metadata: The checkpoint.
        structure: The model's tensors when it was recorded.
        plan: Where an update lands.
        pieces: Where it lands if the loader has to run: for opaque modules, and where parameters are no plain storage.
        covered: Names of tensors of which the plan replaces everything.
        routes: Where elements land; for plans without `pieces`.
        unpatchable: Why the live storages cannot be patched; None if they can.
    """

    metadata: tuple[ParamMeta, ...]
    structure: Structure
    plan: LoadPlan
    pieces: PieceStaging | None
    covered: frozenset[str]
    routes: PatchRoutes
    unpatchable: str | None

    def fits(self, model: Any, metadata: tuple[ParamMeta, ...]) -> bool:
        """Whether it still holds."""
        return self.metadata == metadata and self.structure == _structure(model)

    def holds(self, model: Any, metadata: Sequence[ParamMeta]) -> bool:
        """Whether it still holds, and what it says is of these tensors among others."""
        known = self.plan.by_name
        return all(known.get(meta.name) == _plain(meta) for meta in metadata) and self.structure == _structure(model)


def record(model: Any, metadata: tuple[ParamMeta, ...]) -> Recorded | None:
    """Record the loader of `model`, which is not touched; None where no copy of it can be made that loads."""
    if not isinstance(model, nn.Module):
        return None
    try:
        twin = meta_twin(model)
    except Exception:  # noqa: BLE001  the attributes of somebody's model may raise anything
        return None
    loader: Any = twin.load_weights
    if not isinstance(loader, MethodType) or loader.__self__ is not twin:
        return None
    plan = record_loads(twin, metadata)
    plain = not any(is_dtensor(tensor) for tensor in (*model.parameters(), *model.buffers()))
    routes = PatchRoutes(plan.copies)
    pieces = PieceStaging(plan, torch.device("cpu")) if plan.opaque or not plain else None
    unfilled = {name for name, _ in plan.unfilled}
    covered = frozenset(view.name for target in plan.targets if target.name not in unfilled for view in target.views)
    where, reason = pieces.plan if pieces else plan, routes.reason
    if plan.opaque:
        reason = f"module {plan.opaque[0].module!r} takes tensors through its loader alone: {plan.opaque[0].reason}"
    elif pieces:
        reason = "some of the model's parameters are DTensors, which its loader alone can fill"
    return Recorded(metadata, _structure(model), where, pieces, covered, routes, reason)


def _plain(meta: ParamMeta) -> ParamMeta:
    """A parameter without its owners, as plans have it."""
    return meta if meta.owners is None else ParamMeta(meta.name, meta.dtype, meta.shape)


def _structure(model: nn.Module) -> Structure:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, int] = {}  # tied tensors have one number
    return tuple(
        (name, tensor.dtype, tensor.shape, tensor.stride(), first.setdefault(id(tensor), len(first)))
        for name, tensor in named
    )


def ready_storages(plan: LoadPlan, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The flat storages that a plan without opaque modules writes, its constants already there.

    Raises:
        UpdateRefused: See `storages`.
    """
    flat = storages(plan, tensors)
    fill(plan, flat)
    return flat
