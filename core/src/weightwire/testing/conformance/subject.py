"""What is tested: a transport, how to open it, and what it says it can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from weightwire import discovery
from weightwire.loading import load
from weightwire.messages import TrainerInitInfo
from weightwire.registry import engine_class
from weightwire.testing.pool_rank import count_no_leftovers

_joined: set[Callable[[], None]] = set()

CAPABILITIES: Final[Mapping[str, str]] = {
    "full": "sends whole weights",
    "cpu": "works with tensors on the CPU",
    "cuda": "works with tensors on CUDA devices",
    "multi_sender": "several trainer ranks send, each what it is the first owner of",
    "packed": "small parameters travel together",
}
"""The words of `TransportSpec.capabilities` that the kit knows; a transport's own word is `"<backend>.<word>"`."""


@dataclass(frozen=True, slots=True)
class TransportUnderTest:
    """A transport, and how to open it small enough for a test. Travels to rank processes, so it has to pickle.

    Attributes:
        backend: The name it is asked for by.
        options: Keywords of the trainer's init info, on every trainer rank: small buffers, a directory.
        impatience: Further keywords in checks of ranks that stop, so that three seconds of silence are enough. All
            other checks leave a transport its own patience, since on a busy machine a rank may well be late.
        init_info: The init info's class; None takes the one that the trainer engine names.
        buffer_bytes: What the transport's buffers hold in all under `options`; a tensor larger than that is sent.
        register: For a transport that is not installed: a module-level function, called in each process, that
            registers its engines with both factories.
        capabilities: What it can do; None takes what its plugin declares.
        place: Puts a trainer's tensors where the transport reads them best, such as into shared memory: a module-level
            function that is given them by name once, and whose tensors are written from then on. The source then
            offers all at once.
        join: What a process does once and keeps, such as joining a cluster: a module-level function, called in each
            before anything else.
        foreign_threads: Names of threads that a library starts and ends when it likes, as the kernel knows them.
    """

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    impatience: Mapping[str, Any] = field(default_factory=dict)
    init_info: type[TrainerInitInfo] | None = None
    buffer_bytes: int = 4 << 20
    register: Callable[[], None] | None = None
    capabilities: frozenset[str] | None = None
    place: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    join: Callable[[], None] | None = None
    foreign_threads: tuple[str, ...] = ()

    def declared(self) -> frozenset[str]:
        """The capabilities that decide what is skipped.

        Raises:
            PluginError: The transport cannot be had.
        """
        if self.capabilities is not None:
            return self.capabilities
        if self.register is not None:
            return frozenset({"full", "cpu"})
        found = [one for one in discovery.candidates(self.backend) if one.state != "disabled"]
        if len(found) != 1:
            engine_class("trainer", self.backend)  # raises, in the registry's words
        return load(found[0]).spec.capabilities

    def prepare(self) -> None:
        """Make the transport known to this process."""
        from weightwire.registry import _tables

        if self.join is not None and self.join not in _joined:
            self.join()
            _joined.add(self.join)
            count_no_leftovers()
        if self.register is not None and self.backend not in _tables["worker"].loaders:
            self.register()

    def make_init_info(self, **fields: Any) -> TrainerInitInfo:
        """The init info of one trainer rank: `options`, and `fields` over them."""
        self.prepare()
        cls = self.init_info or engine_class("trainer", self.backend).init_info_cls
        return cls(**{**fields, **self.options})
