"""Copies of a model that its own loader can be tried on: with weights of their own, or without any."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def twin_of(model: nn.Module) -> nn.Module:
    """A deep copy of a model.

    Tensors that share storage share it in the copy too. What hangs on a parameter, such as a loader of its own, is
    copied along, which `copy.deepcopy` alone does not do.

    Raises:
        Exception: Whatever copying the model's attributes raises.
    """
    return _twin(model, _copied, torch.clone)


def meta_twin(model: nn.Module) -> nn.Module:
    """A deep copy like `twin_of`, whose parameters and buffers are on the meta device: no weight is copied.

    Raises:
        Exception: Whatever copying the model's attributes raises.
    """
    return _twin(model, _without_memory, lambda tensor: torch.empty_like(tensor, device="meta"))


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.UntypedStorage(storage.nbytes(), device=storage.device).copy_(storage)  # type: ignore[no-untyped-call]


def _without_memory(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()


def _twin(
    model: nn.Module,
    again: Callable[[torch.UntypedStorage], torch.UntypedStorage],
    unusual: Callable[[Tensor], Tensor],
) -> nn.Module:
    memo: dict[int, Any] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    tensors = list({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values())
    with torch.no_grad(), torch.inference_mode(False):
        for tensor in tensors:
            plain = tensor.detach()
            if type(plain) is Tensor and plain.layout == torch.strided:
                storage = plain.untyped_storage()
                if storage._cdata not in storages:
                    storages[storage._cdata] = again(storage)
                memo[id(tensor)] = _as(tensor, _view_like(plain, storages[storage._cdata]))
            else:
                memo[id(tensor)] = _as(tensor, unusual(plain))
    # A loader that hangs on a parameter is often a method of a module: both have to be of one copy.
    twin = copy.deepcopy(model, memo)
    for tensor in tensors:
        for key, value in vars(tensor).items():
            vars(memo[id(tensor)]).setdefault(key, copy.deepcopy(value, memo))
    return twin


def _view_like(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return empty.set_(storage, int(tensor.storage_offset()), tensor.size(), tensor.stride())


def _as(tensor: Tensor, data: Tensor) -> Tensor:
    """`data` as what `tensor` is: a parameter, of its own class, or a buffer."""
    if not isinstance(tensor, nn.Parameter):
        return data
    if type(tensor) is nn.Parameter:
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    # `as_subclass` would give a view, whose base counts as somebody that holds the storage.
    return Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
