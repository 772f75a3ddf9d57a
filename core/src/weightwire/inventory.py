"""What a model consists of, for a sink: its tensors, their names, and which of them share storage."""

from __future__ import annotations

import difflib
import operator
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightwire.errors import UpdateRefused
from weightwire.layout import ParamMeta, dtype_name
from weightwire.staging import is_dense, sha256

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_LISTED = 3


@dataclass(eq=False, slots=True)
class Views:
    """One storage seen as the tensors of a group, in the order of its entries."""

    storage: torch.UntypedStorage
    tensors: list[torch.Tensor]
    ours: bool
    """Whether a sink allocated it, so that it may be received into again."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Group:
    """The entries that live in one storage and so are rebound together.

    Attributes:
        storage: The live one.
        spare: A second storage to receive into.
        adopted: The live storage was handed over by a transport: that others lie in it too is no wish of the model.
        copied_because: Why a rebind would not be seen; None where it is.
    """

    storage: torch.UntypedStorage
    entries: list[Entry] = field(default_factory=list)
    live: Views | None = None
    spare: Views | None = None
    adopted: bool = False
    copied_because: str | None = None

    def views(self) -> Views:
        """The live storage as tensors, kept so that a rebind can be undone and repeated."""
        if self.live is None:
            with torch.inference_mode(False):
                tensors = [entry.tensors[0].data for entry in self.entries]
            self.live = Views(self.storage, tensors, ours=False)
        return self.live

    def count_tensors(self) -> int:
        """How many tensors over the live storage are accounted for: the model's and our views."""
        return sum(len(entry.tensors) for entry in self.entries) + len(self.views().tensors)


@dataclass(eq=False, slots=True)
class Entry:
    """One tensor of a model under all its names.

    Attributes:
        tensors: The objects of the model that are this tensor: several where it is tied by storage.
        names: Its names in state-dict order; none for a buffer that is not persistent.
        index: Its place in `group`.
        direct: Contiguous, so that bytes may be received straight into it.
        dense: It fills an interval of its storage.
        picks: For a DTensor, which indices of each dimension of the full tensor this rank has.
        copied_because: Why there is no `group`.
        refused: Why it takes no weights at all.
    """

    tensors: list[torch.Tensor]
    parameter: bool
    names: list[str] = field(default_factory=list)
    index: int = 0
    direct: bool = False
    dense: bool = False
    picks: tuple[slice | torch.Tensor, ...] | None = None
    copied_because: str | None = None
    refused: str | None = None
    _group: weakref.ref[Group] | None = None

    @property
    def group(self) -> Group | None:
        """Its storage; None where only `copy_` writes it. Kept alive by the inventory.

        A cycle of references would keep views alive until the collector runs, and they would count as held elsewhere.
        """
        return None if self._group is None else self._group()

    @property
    def has_bytes(self) -> bool:
        """Whether `local` is plain memory."""
        return self.refused is None and (self.group is not None or self.picks is not None)

    def lands(self, meta: ParamMeta) -> bool:
        """Whether bytes of the wire are received straight to where they belong."""
        return self.direct and meta.dtype == self.tensors[0].dtype

    @property
    def live(self) -> torch.Tensor:
        """The kept view of the live memory, where there is a group."""
        assert self.group is not None
        return self.group.views().tensors[self.index]

    @property
    def local(self) -> torch.Tensor:
        """The live tensor to write: a DTensor's local one."""
        tensor: Any = self.tensors[0]
        local: torch.Tensor = tensor.to_local() if self.picks is not None else tensor.detach()
        return local

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """The part of `full` that this rank has."""
        for dim, pick in enumerate(self.picks or ()):
            if isinstance(pick, slice):
                full = full.narrow(dim, pick.start, pick.stop - pick.start)
            else:
                full = full.index_select(dim, pick.to(full.device))
        return full


@dataclass(eq=False, slots=True)
class Inventory:
    """All tensors of one model as they were found; `unchanged` says whether they still are so."""

    entries: list[Entry] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    by_name: dict[str, Entry] = field(default_factory=dict)
    inference: bool = False
    places: list[dict[str, Any]] = field(default_factory=list)
    """Where modules keep parameters, buffers and other modules."""
    found: list[object] = field(default_factory=list)
    """What was in `places`."""
    bound: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
    """The tensor objects that can be rebound, and beside each a view of the memory it should have."""
    _adopted_users: dict[int, int] = field(default_factory=dict)

    def unchanged(self) -> bool:
        """Whether the model still has the same tensors over the same memory."""
        if self.bound is None:
            entries = [entry for entry in self.entries if entry.group is not None]
            pairs = [(tensor, entry.live) for entry in entries for tensor in entry.tensors]
            self.bound = [tensor for tensor, _ in pairs], [view for _, view in pairs]
        found = [value for place in self.places for value in place.values()]
        return (
            len(found) == len(self.found)
            and all(map(operator.is_, found, self.found))
            and all(tensor.dtype == view.dtype for tensor, view in zip(*self.bound, strict=True))
            and all(map(torch.Tensor.is_set_to, *self.bound))
        )

    def rebound(self, tensors: list[torch.Tensor], memory: list[torch.Tensor]) -> None:
        """Note that a commit has bound `tensors` to `memory`."""
        self._adopted_users.clear()
        if not tensors:
            return
        complete = self.bound is not None and len(self.bound[0]) == len(tensors)
        self.bound = (tensors, memory) if complete else None

    def known_users(self, group: Group) -> int:
        """How many tensors over the live storage of `group` are accounted for."""
        if not group.adopted:
            return group.count_tensors()
        handle = group.storage._cdata
        if handle not in self._adopted_users:
            here = [other for other in self.groups if other.storage is group.storage]
            self._adopted_users[handle] = sum(other.count_tensors() for other in here)
        return self._adopted_users[handle]

    def checksums(self) -> dict[str, str]:
        """See `WeightSink.checksums`."""
        entries = [entry for entry in self.entries if entry.names and entry.has_bytes]
        return {entry.names[0]: sha256(entry.local) for entry in entries}

    def zero(self) -> None:
        """Fill every parameter with zeros."""
        with self.writing():
            for entry in self.entries:
                if entry.parameter and entry.has_bytes:
                    entry.local.zero_()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The mode in which live tensors may be written: those made in inference mode only there."""
        with torch.inference_mode(self.inference), torch.no_grad():
            yield

    def resolve(
        self, metadata: tuple[ParamMeta, ...], *, strict: bool, cast: bool, full: bool
    ) -> dict[str, tuple[Entry, ParamMeta]]:
        """The entry that each parameter goes to; without `strict` the unknown ones are left out.

        Raises:
            UpdateRefused: Naming the first parameter that is unknown, repeated, of other shape or dtype, or missing.
        """
        unknown = [meta.name for meta in metadata if meta.name not in self.by_name]
        if unknown and strict:
            raise self._unknown(unknown)
        chosen: dict[str, tuple[Entry, ParamMeta]] = {}
        taken: dict[Entry, str] = {}
        for meta in metadata:
            name, entry = meta.name, self.by_name.get(meta.name)
            if entry is None:
                continue
            if name in chosen:
                raise UpdateRefused(f"{name!r} occurs twice in the update", parameter=name)
            if (other := taken.setdefault(entry, name)) != name:
                words = f"{name!r} and {other!r} are one tied parameter here: send it under one of its names"
                raise UpdateRefused(words, parameter=name)
            check(entry, meta, cast=cast)
            chosen[name] = (entry, meta)
        missing = [entry.names[0] for entry in self.entries if entry.parameter and entry not in taken]
        if strict and full and missing:
            listed = ", ".join(map(repr, missing[:_LISTED])) + (", ..." if len(missing) > _LISTED else "")
            words = f"a full update must bring every parameter; {len(missing)} are missing: {listed}"
            raise UpdateRefused(words, parameter=missing[0])
        return chosen

    def _unknown(self, names: list[str]) -> UpdateRefused:
        near = difflib.get_close_matches(names[0], self.by_name, n=_LISTED)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        more = f" ({len(names) - 1} more names are unknown)" if len(names) > 1 else ""
        return UpdateRefused(f"the model has no parameter {names[0]!r}{hint}{more}", parameter=names[0])


def check(entry: Entry, meta: ParamMeta, *, cast: bool) -> None:
    """Compare shape and dtype.

    Raises:
        UpdateRefused: They differ, or `entry` takes no weights.
    """
    tensor, name = entry.tensors[0], meta.name
    if entry.refused is not None:
        raise UpdateRefused(f"{name!r} cannot take weights: {entry.refused}", parameter=name)
    if tuple(meta.shape) != tuple(tensor.shape):
        words = f"{name!r} has shape {tuple(tensor.shape)} here, and {tuple(meta.shape)} in the update"
        raise UpdateRefused(words, parameter=name)
    if meta.dtype != tensor.dtype and not (cast and torch.can_cast(meta.dtype, tensor.dtype)):
        hint = "no cast between them is allowed" if cast else "a worker with cast=True converts"
        here, there = dtype_name(tensor.dtype), dtype_name(meta.dtype)
        raise UpdateRefused(f"{name!r} is {here} here, and {there} in the update; {hint}", parameter=name)


def check_tensor(name: str, meta: ParamMeta, tensor: torch.Tensor) -> None:
    """Compare a tensor that came with what was announced.

    Raises:
        UpdateRefused: They differ.
    """
    if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
        came = f"{tuple(tensor.shape)} {tensor.dtype}"
        words = f"{name!r} came as {came}, and was announced as {tuple(meta.shape)} {meta.dtype}"
        raise UpdateRefused(words, parameter=name)


def scan(model: nn.Module, previous: Inventory | None = None) -> Inventory:
    """Look through `model`, under the names of its state dict.

    Args:
        model: Plain, compiled, with DTensor parameters, or under FSDP2's `fully_shard`.
        previous: What was found before: FSDP2 hides its sharded parameters while the gathered ones are in use, and
            which storages were adopted from a transport is written nowhere else.
    """
    return _Scan(model, previous).found


class _Scan:
    def __init__(self, model: nn.Module, previous: Inventory | None) -> None:
        self.found = Inventory()
        self._by_object: dict[int, Entry] = {}
        self._by_place: dict[object, Entry] = {}
        self._by_storage: dict[int, Group] = {}
        self._adopted = _adopted_tensors(previous)
        sharded = previous.by_name if previous is not None and fsdp_modules(model) else {}
        for name, tensor, parameter, persistent in self._walk(model):
            clean = name
            for wrapper in _WRAPPERS:
                clean = clean.replace(wrapper, "")
            if clean in sharded and is_dtensor(sharded[clean].tensors[0]):
                tensor = sharded[clean].tensors[0]
            entry = self._by_object.get(id(tensor))
            if entry is None:
                entry = self._by_object[id(tensor)] = self._entry(tensor)
            entry.parameter |= parameter
            if persistent:
                for alias in (clean, name):
                    if self.found.by_name.setdefault(alias, entry) is entry and alias not in entry.names:
                        entry.names.append(alias)
        self.found.found = [value for place in self.found.places for value in place.values()]

    def _walk(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool, bool]]:
        """Name, tensor, whether a parameter, whether in the state dict; notes where each was found."""
        for prefix, module in model.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            self.found.places += [module._parameters, module._buffers, module._modules]
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    yield dot + key, parameter, True, True
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    yield dot + key, buffer, False, key not in module._non_persistent_buffers_set

    def _entry(self, tensor: torch.Tensor) -> Entry:
        """The entry of an object not met before: a new one, unless it lies exactly where another does."""
        entry = Entry([tensor], parameter=False)
        entry.refused = _refusal(tensor)
        if entry.refused is None and is_dtensor(tensor):
            entry.copied_because, entry.picks = "DTensor", _picks(tensor)
            entry.refused = None if entry.picks is not None else "this rank has no plain piece of the DTensor"
        elif entry.refused is None and is_traceable_wrapper_subclass(tensor):
            entry.copied_because = type(tensor).__name__
        elif entry.refused is None:
            place = (
                tensor.untyped_storage()._cdata,
                tensor.storage_offset(),
                tensor.size(),
                tensor.stride(),
                tensor.dtype,
            )
            if tensor.numel() and place in self._by_place:
                self._by_place[place].tensors.append(tensor)
                return self._by_place[place]
            self._by_place[place] = entry
            self._join_group(entry, tensor)
        self.found.entries.append(entry)
        return entry

    def _join_group(self, entry: Entry, tensor: torch.Tensor) -> None:
        storage, adopted = tensor.untyped_storage(), id(tensor) in self._adopted
        group = None if adopted else self._by_storage.get(storage._cdata)
        if group is None:
            group = Group(storage, adopted=adopted)
            if storage.device.type == "cpu" and storage.is_shared():
                group.copied_because = "memory that is mapped or shared with other processes"
            self.found.groups.append(group)
            if not adopted:
                self._by_storage[storage._cdata] = group
        entry._group, entry.index = weakref.ref(group), len(group.entries)
        entry.direct, entry.dense = tensor.is_contiguous(), is_dense(tensor)
        group.entries.append(entry)
        self.found.inference |= tensor.is_inference()


def _adopted_tensors(previous: Inventory | None) -> set[int]:
    return {
        id(tensor)
        for group in (previous.groups if previous is not None else ())
        if group.adopted
        for entry in group.entries
        for tensor in entry.tensors
        if tensor.untyped_storage() is group.storage
    }


def _refusal(tensor: torch.Tensor) -> str | None:
    if is_lazy(tensor):
        return "it is not initialised yet, run the model once first"
    if tensor.is_meta:
        return "it is on the meta device, give the model memory first"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return "it is sparse or quantised"
    if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return "its elements share memory"
    return None


def reshard(model: nn.Module) -> None:
    """Let FSDP2 drop the gathered parameters it keeps, or the next forward pass uses them again."""
    for module in fsdp_modules(model):
        module.reshard()


def is_dtensor(tensor: object) -> bool:
    """Whether `tensor` is a DTensor; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that FSDP2's `fully_shard` manages; imports nothing."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def _picks(tensor: Any) -> tuple[slice | torch.Tensor, ...] | None:
    """Which indices of each dimension this rank has; None for Partial and for ranks outside the mesh.

    Placements are applied from left to right; a strided one (FSDP2 over tensor parallelism) cuts each of
    `split_factor` chunks, as `torch.distributed.tensor` does.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    indices = [torch.arange(size) for size in tensor.shape]
    for position, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or coordinate is None:
            return None
        pieces = indices[dim].chunk(getattr(placement, "split_factor", 1))
        parts, index = tensor.device_mesh.size(position), coordinate[position]
        cut = [piece.chunk(parts)[index : index + 1] for piece in pieces]
        indices[dim] = torch.cat([torch.arange(0), *(part for own in cut for part in own)])
    if coordinate is None or tuple(map(len, indices)) != tuple(tensor.to_local().shape):
        return None
    return tuple(_as_slice(index) for index in indices)


def _as_slice(index: torch.Tensor) -> slice | torch.Tensor:
    start = int(index[0]) if len(index) else 0
    whole = torch.equal(index, torch.arange(start, start + len(index)))
    return slice(start, start + len(index)) if whole else index
