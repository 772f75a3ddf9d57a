"""Installing what came by a LoadPlan: into the target regions themselves, or through the model's own loader.

Through the loader is for hosts that rebuild what kernels use when they load, and for plans with opaque modules: it
gets stand-ins whose `copy_` writes the piece that came, and ordinary tensors where a plan wants them in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weightwire.errors import UpdateRefused
from weightwire.load_plan import LoadPlan, Target, View, once, repeated
from weightwire.plan_assembly import in_units
from weightwire.region import Region
from weightwire.stand_in import Handler, StandIn, region_of, replaced

Resolve = Callable[[str, Region], Tensor]
"""Gives the elements of a region of a source, as a tensor of the region's sizes."""


def from_full(tensors: Mapping[str, Tensor]) -> Resolve:
    """Take regions out of full checkpoint tensors."""
    flat = {name: tensor.contiguous().reshape(-1) for name, tensor in tensors.items()}

    def resolve(name: str, region: Region) -> Tensor:
        return flat[name].as_strided(region.sizes, region.strides, flat[name].storage_offset() + region.offset)

    return resolve


def from_pieces(pieces: Mapping[tuple[str, Region], Tensor]) -> Resolve:
    """Take regions out of pieces that came: under the keys of `LoadPlan.pieces`, contiguous, of the source's dtype.

    Raises:
        UpdateRefused: When asked for a region that is none of them.
    """

    def resolve(name: str, region: Region) -> Tensor:
        piece = pieces.get((name, once(region)))
        if piece is None:
            words = f"the loader asks for a part of {name!r} that it did not use when it was recorded: {region}"
            raise UpdateRefused(f"{words}; record it anew, or send the tensor in full", parameter=name)
        return piece.reshape(-1).as_strided(region.sizes, repeated(region), piece.storage_offset())

    return resolve


def storages(plan: LoadPlan, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The storage of every target that the plan writes, as a flat tensor in which its regions count.

    Args:
        plan: Without opaque modules.
        tensors: The parameters and buffers of the model, or what is to take their places, by path.

    Raises:
        UpdateRefused: One is missing, or lies in its storage in another way than the twin's.
    """
    written = {copy.target for copy in plan.copies} | {fill.target for fill in plan.fills}
    return {target.name: _storage(target, tensors) for target in plan.targets if target.name in written}


def _storage(target: Target, tensors: Mapping[str, Tensor]) -> Tensor:
    first = _found(target.views[0], target, tensors)
    shift = first.storage_offset() - target.views[0].offset
    for view in target.views:
        tensor = _found(view, target, tensors)
        here = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset() - shift)
        apart = tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() and tensor.numel()
        if here != (view.shape, view.strides, view.offset) or tensor.dtype != first.dtype or apart:
            words = f"{view.name!r} lies in its storage in another way than when its loading was recorded"
            raise UpdateRefused(words, parameter=view.name)
    whole = first.untyped_storage().nbytes() // first.element_size()
    start = min(max(shift, 0), whole)
    if shift < 0 or whole - start < min(target.size, _reach(target)):
        raise UpdateRefused(f"the storage of {target.name!r} is too small", parameter=target.name)
    # Of what was made in inference mode and rebound since, `detach()` would have no views in other modes.
    return first.data.as_strided((whole - start,), (1,), start)


def _found(view: View, target: Target, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors.get(view.name)
    if tensor is None or (view is target.views[0] and tensor.dtype != target.dtype):
        what = "has none of this name" if tensor is None else f"has it as {tensor.dtype}, not {target.dtype}"
        raise UpdateRefused(f"{view.name!r} was recorded, and the model {what}", parameter=view.name)
    return tensor


def _reach(target: Target) -> int:
    """The elements of the storage up to the end of the last view."""
    ends = [
        view.offset + 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
        for view in target.views
        if 0 not in view.shape
    ]
    return max(ends, default=0)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by path, tied ones under every name."""
    found = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def install(plan: LoadPlan, tensors: Mapping[str, Tensor], resolve: Resolve) -> None:
    """Write everything into plain storage, bit for bit as the loader would.

    Args:
        plan: Without opaque modules.
        tensors: See `storages`.
        resolve: See `from_full` and `from_pieces`.

    Raises:
        UpdateRefused: The plan has opaque modules (use `feed`), or the model is not as recorded.
    """
    if plan.opaque:
        module = plan.opaque[0]
        raise UpdateRefused(f"module {module.module!r} takes tensors through its loader alone: {module.reason}")
    flat = storages(plan, tensors)
    fill(plan, flat)
    with torch.no_grad():
        for copy in plan.copies:
            destination = flat[copy.target].view(plan.by_name[copy.source].dtype)
            _part(destination, copy.target_region).copy_(resolve(copy.source, copy.source_region))


def fill(plan: LoadPlan, flat: Mapping[str, Tensor]) -> None:
    """Write the constants of a plan into what `storages` gave."""
    with torch.no_grad():
        for one in plan.fills:
            destination = flat[one.target]
            bits = torch.tensor(list(bytes.fromhex(one.bits)), dtype=torch.uint8)
            _part(destination, one.region).copy_(bits.view(destination.dtype).reshape(()).to(destination.device))


def _part(flat: Tensor, region: Region) -> Tensor:
    return flat.as_strided(region.sizes, region.strides, flat.storage_offset() + region.offset)


def feed(
    plan: LoadPlan,
    load: Callable[[Iterable[tuple[str, Tensor]]], object],
    resolve: Resolve,
    full: Mapping[str, Tensor],
    *,
    device: torch.device | None = None,
) -> None:
    """Call a model's loader with every source: stand-ins for pieces, ordinary tensors for what is wanted in full.

    Destinations on the meta device are only counted, as vLLM's layerwise reload does at first; the loader may keep
    stand-ins as long as `resolve` can answer.

    Args:
        plan: What was recorded of this loader.
        load: The loader.
        resolve: See `from_pieces`.
        full: The tensors of `plan.full_sources`.
        device: Where stand-ins claim to be; the CPU if None.

    Raises:
        UpdateRefused: The loader does with a stand-in what it did not do when it was recorded, or a tensor is missing.
        Exception: Whatever else the loader raises.
    """
    missing = [name for name in plan.full_sources if name not in full]
    if missing:
        raise UpdateRefused(f"{missing[0]!r} has to come in full", parameter=missing[0])
    feeder = _Feeder(plan, resolve)
    feeder.device = torch.device("cpu") if device is None else device
    with torch.no_grad():
        load(feeder.pairs(full))


class _Feeder(Handler):
    """Stand-ins that resolve to what came."""

    def __init__(self, plan: LoadPlan, resolve: Resolve) -> None:
        self._plan = plan
        self._resolve = resolve
        self._shadowed = frozenset(plan.shadowed)
        self._wanted = frozenset(plan.pieces)

    def pairs(self, full: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for meta in self._plan.sources:
            if meta.name in full:
                yield meta.name, full[meta.name]
            else:
                shadow = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
                yield meta.name, StandIn(shadow, meta.name, self)

    def copy(self, destination: Tensor, stand_in: StandIn) -> Tensor:
        """See `Handler.copy`: the piece is written, or counted where there is no memory yet."""
        shadow = stand_in._shadow
        if destination.is_meta:
            return destination.copy_(shadow)
        if not shadow.numel():
            return destination.copy_(torch.empty(shadow.shape, dtype=shadow.dtype))
        key = (stand_in._origin, self._needed(stand_in))
        if key in self._shadowed and key not in self._wanted:
            return destination
        return destination.copy_(self._value(stand_in))

    def _needed(self, stand_in: StandIn) -> Region:
        """The elements of the source that a stand-in is made of, each once."""
        region, itemsize = once(region_of(stand_in._shadow)), self._plan.by_name[stand_in._origin].dtype.itemsize
        needed = in_units(region, stand_in._shadow.dtype.itemsize, itemsize)
        if needed is None:
            name = stand_in._origin
            raise UpdateRefused(f"the loader cuts through elements of {name!r}", parameter=name)
        return once(needed)

    def _value(self, stand_in: StandIn) -> Tensor:
        """What came for a stand-in, in the dtype in which the loader sees it."""
        piece = self._resolve(stand_in._origin, self._needed(stand_in)).contiguous().reshape(-1)
        piece = piece.view(stand_in._shadow.dtype)
        region = region_of(stand_in._shadow)
        return piece.as_strided(region.sizes, repeated(region), piece.storage_offset())

    def read(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `Handler.read`."""
        return self.other(function, args, kwargs)

    def other(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `Handler.other`: it gets what came, if that is here."""
        return function(*replaced(args, self._leaf), **replaced(kwargs, self._leaf))

    def dispatch(self, function: Any, args: Any, kwargs: Any) -> Any:
        """See `Handler.dispatch`."""
        return self.other(function, args, kwargs)

    def _leaf(self, leaf: Any) -> Any:
        return self._value(leaf) if isinstance(leaf, StandIn) else leaf
