"""Memory that is registered with NIXL once and used for as long as it exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from weightwire_rdt.nixl_agent import NixlAgent, Span, memory_of


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
        agent: The process's agent.

    Attributes:
        changes: How often something was registered, so that the others know whether they have to be told.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
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
            self._agent.deregister(self._known.pop(key).registration)
        span = Span(storage.data_ptr(), storage.nbytes(), tensor.device.index or 0)
        registration = self._agent.register([span], memory_of(tensor.device))
        self._known[key] = _Known(_weak(storage), storage.nbytes(), registration)
        self.changes += 1

    def sweep(self) -> None:
        """Take back what has been freed since."""
        for key in [key for key, known in self._known.items() if known.storage.expired()]:
            self._agent.deregister(self._known.pop(key).registration)

    def close(self) -> None:
        """Take everything back."""
        while self._known:
            self._agent.deregister(self._known.popitem()[1].registration)


def _weak(storage: torch.UntypedStorage) -> Any:
    """Tells with `expired()` whether a storage has been freed."""
    make: Any = reductions.StorageWeakRef
    return make(storage)
