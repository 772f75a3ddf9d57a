"""Looking through a model for what a sink can write."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightwire.dtensor import is_dtensor, is_member, mesh_layout, piece
from weightwire.inventory import Entry, Group, Inventory, Views
from weightwire.layout import Box, ParamMeta
from weightwire.staging import is_dense

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def scan(model: nn.Module, previous: Inventory | None = None) -> Inventory:
    """Look through `model`, under the names of its state dict.

    Args:
        model: Plain, compiled, with DTensor parameters, or under FSDP2's `fully_shard`.
        previous: What was found before: FSDP2 hides its sharded parameters while the gathered ones are in use, and
            which storages were adopted from a transport is written nowhere else.
    """
    return _Scan(model, previous).inventory


class _Scan:
    def __init__(self, model: nn.Module, previous: Inventory | None) -> None:
        self.inventory = Inventory()
        self._by_object: dict[int, Entry] = {}
        self._by_place: dict[object, Entry] = {}
        self._by_storage: dict[int, Group] = {}
        self._adopted = _adopted_tensors(previous)
        hidden = _sharded_tensors(model, previous)
        for name, tensor, parameter, persistent in self._walk(model):
            clean = name
            for wrapper in _WRAPPERS:
                clean = clean.replace(wrapper, "")
            tensor = hidden.get(clean, tensor)
            entry = self._by_object.get(id(tensor))
            if entry is None:
                entry = self._by_object[id(tensor)] = self._entry(tensor)
            entry.parameter |= parameter
            for alias in dict.fromkeys((clean, name) if persistent else ()):
                if self.inventory.by_name.setdefault(alias, entry) is entry:
                    entry.names.append(alias)
        for group in self.inventory.groups:
            group.views()  # taken now, so that whatever changes from here on is noticed

    def _walk(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool, bool]]:
        """Name, tensor, whether a parameter, whether in the state dict; notes where each was found."""
        for prefix, module in model.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            for place in (module._parameters, module._buffers, module._modules):
                (self.inventory.places if place else self.inventory.vacant).append(place)
                self.inventory.found += place.values()
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    yield dot + key, parameter, True, True
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    yield dot + key, buffer, False, key not in module._non_persistent_buffers_set

    def _entry(self, tensor: torch.Tensor) -> Entry:
        """The entry of an object not met before: a new one, unless it lies exactly where another does."""
        entry = Entry([tensor], refused=_refusal(tensor))
        if entry.refused is None and is_dtensor(tensor):
            self.inventory.sharded, entry.copied_because = True, "DTensor"
            entry.box, entry.refused = _box(tensor)
        elif entry.refused is None and is_traceable_wrapper_subclass(tensor):
            entry.copied_because = type(tensor).__name__
        elif entry.refused is None:
            where = tensor.untyped_storage()._cdata, tensor.storage_offset()
            place = (*where, tensor.size(), tensor.stride(), tensor.dtype)
            if tensor.numel() and place in self._by_place:
                self._by_place[place].tensors.append(tensor)
                return self._by_place[place]
            self._by_place[place] = entry
            entry.direct, entry.dense = tensor.is_contiguous(), is_dense(tensor)
            entry.join(self._group(tensor))
            self.inventory.inference |= tensor.is_inference()
        self.inventory.entries.append(entry)
        return entry

    def _group(self, tensor: torch.Tensor) -> Group:
        storage, adopted = tensor.untyped_storage(), id(tensor) in self._adopted
        if not adopted and storage._cdata in self._by_storage:
            return self._by_storage[storage._cdata]
        group = Group([Views(storage, [], ours=False), None], adopted=adopted)
        if storage.device.type == "cpu" and storage.is_shared():
            group.copied_because = "memory that is mapped or shared with other processes"
        if not adopted:
            self._by_storage[storage._cdata] = group
        self.inventory.groups.append(group)
        return group


def _adopted_tensors(previous: Inventory | None) -> set[int]:
    return {
        id(tensor)
        for group in (previous.groups if previous is not None else ())
        if group.adopted
        for entry in group.entries
        for tensor in entry.tensors
        if tensor.untyped_storage() is group.storage
    }


def _sharded_tensors(model: nn.Module, previous: Inventory | None) -> dict[str, torch.Tensor]:
    """By name, the sharded parameters that FSDP2 may hide behind gathered ones."""
    bases = (base.__name__ for module in model.modules() for base in type(module).__mro__)
    if previous is None or not previous.sharded or "FSDPModule" not in bases:
        return {}
    return {name: entry.tensors[0] for name, entry in previous.by_name.items() if is_dtensor(entry.tensors[0])}


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


def _box(tensor: torch.Tensor) -> tuple[Box | None, str | None]:
    """The part of a DTensor that this rank has, or why there is none."""
    assert is_dtensor(tensor)
    layout = mesh_layout(tensor)
    if layout.placements is None or not is_member(tensor):
        return None, layout.reason or "this rank is not in its mesh"
    meta = ParamMeta(
        "a DTensor",
        tensor.dtype,
        tuple(tensor.shape),
        owners=layout.owners,
        mesh_shape=layout.mesh_shape,
        placements=layout.placements,
    )
    box = meta.box(tensor.device_mesh.get_rank())
    assert box.empty or box.shape == tuple(piece(tensor).shape), "the geometry is torch's"
    return box, None
