"""What a transport's plugin may implement.

A plugin is the module that an entry point of the group `weightwire.transports` names. It is a leaf: it
imports neither torch nor its own engines, and answers these hooks with plain data:

    from weightwire.hookspecs import Register, TransportSpec, hookimpl

    @hookimpl
    def weightwire_transport() -> TransportSpec:
        return TransportSpec(backend="acme", api_version=(1, 0), wire_version=1)

    @hookimpl
    def weightwire_register_worker_engines(register: Register) -> None:
        register("acme", "acme_weightwire.engine", "AcmeWeightTransferEngine")

Every hook is called on the plugin that owns the backend and on no other, each of which has its own manager.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol

import pluggy

PROJECT: Final = "weightwire"

Role = Literal["worker", "trainer"]
"""Which side of a transfer a process is; it never imports the other side's engine."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpec:
    """What a transport is, as pure data.

    Attributes:
        backend: The name it is asked for by; an entry point of that name must exist.
        aliases: Other names for it, each an entry point of its own with the same value.
        api_version: The `weightwire.API_VERSION` it was written for. It loads where the major number is the
            same and the minor number is not newer than the host's.
        wire_version: Version of what it sends; both ends compare it before any byte moves.
        capabilities: What it can do, in words that the conformance kit knows.
    """

    backend: str
    aliases: tuple[str, ...] = ()
    api_version: tuple[int, int]
    wire_version: int
    capabilities: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a transport can work in this process.

    Attributes:
        usable: False where it is installed and cannot work.
        reason: Why not, as a clause (`"this machine has no CUDA device"`).
        remedy: What to do about it, as a clause.
    """

    usable: bool
    reason: str = ""
    remedy: str = ""


class Register(Protocol):
    """The callback that the two register hooks are given; it imports nothing."""

    def __call__(self, name: str, module_path: str, class_name: str) -> None:
        """Say that `class_name` in `module_path` is the engine of backend `name`."""


class TransportHooks(Protocol):
    """The hooks. Only `weightwire_transport` has to be implemented."""

    @hookspec(firstresult=True)
    def weightwire_transport(self) -> TransportSpec | None:
        """Declare the transport. Called once, when it is first asked for."""

    @hookspec
    def weightwire_register_worker_engines(self, register: Register) -> None:
        """Name the worker's engine. Called in processes that receive weights."""

    @hookspec
    def weightwire_register_trainer_engines(self, register: Register) -> None:
        """Name the trainer's engine. Called in processes that send weights."""

    @hookspec(firstresult=True)
    def weightwire_available(self, role: Role) -> Availability | None:
        """Say whether the transport can work here as `role`; no answer means that it can."""
