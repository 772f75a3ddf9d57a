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

from collections.abc import Iterable
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

    Raises:
        TypeError: A field of another type.
    """

    backend: str
    aliases: tuple[str, ...] = ()
    api_version: tuple[int, int]
    wire_version: int
    capabilities: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        _check(self, "backend", isinstance(self.backend, str) and bool(self.backend), "a name")
        _check(self, "aliases", isinstance(self.aliases, tuple) and _all(self.aliases, str), "a tuple of names")
        pair = isinstance(self.api_version, tuple) and len(self.api_version) == 2 and _all(self.api_version, int)
        _check(self, "api_version", pair, "two integers, as weightwire.API_VERSION is")
        _check(self, "wire_version", isinstance(self.wire_version, int), "an integer")
        words = isinstance(self.capabilities, frozenset) and _all(self.capabilities, str)
        _check(self, "capabilities", words, "a frozenset of words")


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a transport can work in this process.

    Attributes:
        usable: False where it is installed and cannot work.
        reason: Why not, as a clause (`"this machine has no CUDA device"`).
        remedy: What to do about it, as a clause.

    Raises:
        TypeError: A field of another type.
        ValueError: It is not usable and there is no reason.
    """

    usable: bool
    reason: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        _check(self, "usable", isinstance(self.usable, bool), "a bool")
        _check(self, "reason", isinstance(self.reason, str), "a string")
        _check(self, "remedy", isinstance(self.remedy, str), "a string")
        if not self.usable and not self.reason:
            raise ValueError("Availability(False) needs a reason: why can it not work here, and what would help?")


def _check(value: object, field: str, good: bool, wanted: str) -> None:
    if not good:
        raise TypeError(f"{type(value).__name__}.{field} must be {wanted}, got {getattr(value, field)!r}")


def _all(values: Iterable[object], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


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
        """Name the worker's engine. Called in processes that receive weights, and by `weightwire plugins`."""

    @hookspec
    def weightwire_register_trainer_engines(self, register: Register) -> None:
        """Name the trainer's engine. Called in processes that send weights, and by `weightwire plugins`."""

    @hookspec(firstresult=True)
    def weightwire_available(self, role: Role) -> Availability | None:
        """Say whether the transport can work here as `role`; no answer means that it can."""
