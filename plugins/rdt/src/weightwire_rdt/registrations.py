"""Memory that is registered with NIXL once and used for as long as it exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions


@dataclass(frozen=True, slots=True)
class _Known:
    storage: Any
    nbytes: int
    registration: Any


class Registrations:
    """The storages that this end of a link has registered; it keeps none of them alive.

    A storage is registered whole, when a tensor in it is first used. Once it has been freed its address may come
    again for another one, with other pages behind it, so what is expired is never taken for registered.

    Args:
        register: Has the storage of a tensor registered, whole.
        deregister: Takes that back, given what `register` returned.

    Attributes:
        changes: How often something was registered, so that the others know whether they have to be told.
    """

    def __init__(self, register: Callable[[Tensor], Any], deregister: Callable[[Any], None]) -> None:
        self._register = register
        self._deregister = deregister
        self._known: dict[tuple[torch.device, int], _Known] = {}
        self.changes = 0

    def hold(self, tensor: Tensor) -> None:
        """Make sure that the memory of `tensor` may be read or written."""
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        known = self._known.get(key)
        if known is not None:
            if not known.storage.expired() and known.nbytes == storage.nbytes():
                return
            self._deregister(self._known.pop(key).registration)
        self._known[key] = _Known(_weak(storage), storage.nbytes(), self._register(tensor))
        self.changes += 1

    def sweep(self) -> None:
        """Take back what has been freed since."""
        for key in [key for key, known in self._known.items() if known.storage.expired()]:
            self._deregister(self._known.pop(key).registration)

    def close(self) -> None:
        """Take everything back."""
        while self._known:
            self._deregister(self._known.popitem()[1].registration)


def _weak(storage: torch.UntypedStorage) -> Any:
    """Tells with `expired()` whether a storage has been freed."""
    make: Any = reductions.StorageWeakRef
    return make(storage)
