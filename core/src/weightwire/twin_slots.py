"""The places of a model that hold parameters and buffers, and what was in them before a loader ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from weightwire.load_plan import Target, View
from weightwire.stand_in import storage_key

_Geometry = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]


@dataclass(eq=False, slots=True)
class Slot:
    """One place of one module.

    Attributes:
        module: Path of the module.
        name: Path of the tensor.
        tensor: What was there.
        saved: Another tensor over the same memory; None where there is no memory yet.
        geometry: Storage, dtype, sizes, strides and offset.
    """

    module: str
    name: str
    tensor: Tensor
    saved: Tensor | None
    geometry: _Geometry | None


class Slots:
    """A model's tensors as they were when this was made.

    Attributes:
        found: By path, parameters of all modules before buffers.
        targets: The storages, in that order.
        owners: The path of the module that the first tensor of each storage belongs to.
        by_storage: Number of the target of each storage.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._before = [(module, dict(module._parameters), dict(module._buffers)) for module in self._modules.values()]
        self.found = {name: _slot(path, name, tensor) for path, name, tensor in _tensors(model)}
        self._rebound: list[Slot] = []
        self.targets: list[Target] = []
        self.owners: list[str] = []
        self.by_storage: dict[int, int] = {}
        grouped: dict[int, list[Slot]] = {}
        for slot in self.found.values():
            if slot.geometry is not None:
                grouped.setdefault(slot.geometry[0], []).append(slot)
        for key, slots in grouped.items():
            self.by_storage[key] = len(self.targets)
            self.targets.append(_target(slots))
            self.owners.append(slots[0].module)

    def prefix(self, name: str) -> str:
        """The path of the module that a checkpoint name seems to belong to; `""` if there is none."""
        parts = name.split(".")
        paths = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((path for path in paths if path in self._modules), "")

    def changed(self, model: nn.Module) -> Iterator[tuple[str, str, Tensor | None]]:
        """Module, name and new tensor of every place that does not hold what it held."""
        now = {name: (path, tensor) for path, name, tensor in _tensors(model)}
        for name, slot in self.found.items():
            if name not in now:
                yield slot.module, name, None
        for name, (path, tensor) in now.items():
            before = self.found.get(name)
            if before is None or tensor is not before.tensor:
                yield path, name, tensor
            elif _geometry(tensor) != before.geometry:
                self._rebound.append(before)
                yield path, name, tensor

    def restore(self) -> None:
        """Put back what `changed` found to be gone; the elements were never written."""
        for module, parameters, buffers in self._before:
            for place, before in ((module._parameters, parameters), (module._buffers, buffers)):
                place.clear()
                place.update(before)
        for slot in self._rebound:
            if slot.saved is not None:
                slot.tensor.data = slot.saved


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for kind in ("_parameters", "_buffers"):
        for path, module in model.named_modules():
            for name, tensor in getattr(module, kind).items():
                if tensor is not None:
                    yield path, f"{path}.{name}" if path else name, tensor


def _geometry(tensor: Tensor) -> _Geometry | None:
    if is_lazy(tensor):
        return None
    return storage_key(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _slot(path: str, name: str, tensor: Tensor) -> Slot:
    geometry = _geometry(tensor)
    return Slot(path, name, tensor, None if geometry is None else tensor.data, geometry)


def _target(slots: list[Slot]) -> Target:
    views = []
    for slot in slots:
        assert slot.geometry is not None
        _, _, shape, strides, offset = slot.geometry
        views.append(View(slot.name, offset, shape, strides))
    first = slots[0].tensor
    size = first.untyped_storage().nbytes() // first.element_size()
    return Target(slots[0].name, first.dtype, size, tuple(views))
