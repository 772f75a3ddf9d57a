"""A transport's plugin, loaded: one at a time, each in a manager of its own, its failure kept as data.

The checks come in this order, and each stops the rest: switched off, `Requires-Dist`, the import, the API
version, the hooks, the names, and last whether it can work here as the role that is asked for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import Final, cast

import pluggy

from weightwire import API_VERSION
from weightwire.discovery import Transport, transports
from weightwire.errors import TransportBroken
from weightwire.hookspecs import PROJECT, Availability, Role, TransportHooks, TransportSpec

SLOW_SECONDS: Final = 1.0
"""A plugin module that takes longer to import holds up every command, and is named for it."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin that was loaded and passed every check that does not depend on a role.

    Attributes:
        transport: Its record, with the name and aliases that the plugin declares.
        spec: What it declares.
        hooks: Its hooks, answered by nobody else.
        seconds: How long its module took to import.
    """

    transport: Transport
    spec: TransportSpec
    hooks: TransportHooks
    seconds: float

    def usable(self, role: Role) -> Transport:
        """The transport's record in state ready, unavailable or broken."""
        try:
            answer = self.hooks.weightwire_available(role=role)
            if not isinstance(answer, Availability | None):
                raise TypeError(f"it answered {answer!r}, not an Availability")
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            return _broken(self.transport, error, "weightwire_available")
        if answer is None or answer.usable:
            return replace(self.transport, state="ready")
        return replace(self.transport, state="unavailable", reason=answer.reason, remedy=answer.remedy)

    def engines(self, role: Role) -> dict[str, tuple[str, str]]:
        """Module and class of the engine of each backend name, for one role; nothing is imported.

        Raises:
            TransportBroken: The hook raised, its exception is chained; or it names a backend that is not its own.
        """
        found: dict[str, tuple[str, str]] = {}

        def register(name: str, module_path: str, class_name: str) -> None:
            if name not in self.transport.names:
                raise ValueError(f"{name!r} is not this transport's: it is {' or '.join(sorted(self.transport.names))}")
            found[name] = (module_path, class_name)

        hooks = self.hooks
        hook = (
            hooks.weightwire_register_worker_engines if role == "worker" else hooks.weightwire_register_trainer_engines
        )
        try:
            hook(register=register)
        except Exception as error:
            raise _broken(self.transport, error, f"weightwire_register_{role}_engines").error() from error
        return found


_loaded: dict[Transport, Plugin] = {}


def examine(transport: Transport) -> Plugin | Transport:
    """Load one plugin; nothing that it does wrong is raised.

    Returns:
        The plugin, or the transport's record with the state in which it got stuck. A success is kept, a
        failure is tried again next time.
    """
    if transport.state in ("disabled", "incompatible", "broken"):
        return transport
    if transport not in _loaded:
        result = _load(transport)
        if isinstance(result, Transport):
            return result
        _loaded[transport] = result
    return _loaded[transport]


def load(transport: Transport) -> Plugin:
    """Load one plugin.

    Raises:
        PluginError: The error of the state in which it got stuck, with the plugin's own exception chained.
    """
    result = examine(transport)
    if isinstance(result, Transport):
        raise result.error()
    return result


def survey() -> list[tuple[Transport, TransportSpec | None]]:
    """Every installed transport with the state it reaches here, and what it declares if it was loaded.

    It is ready where one role at least can use it; the reason then names the role that cannot.
    """
    found: list[tuple[Transport, TransportSpec | None]] = []
    # What a module prints while it is imported is no part of the answer, which may be JSON.
    with contextlib.redirect_stdout(sys.stderr):
        for transport in transports():
            result = transport if transport.state == "conflict" else examine(transport)
            found.append((result, None) if isinstance(result, Transport) else (_reached(result), result.spec))
    return found


def _reached(plugin: Plugin) -> Transport:
    transport = _either(_as_role(plugin, "worker"), _as_role(plugin, "trainer"))
    if transport.state == "ready" and not transport.reason and plugin.seconds > SLOW_SECONDS:
        words = f"its module took {plugin.seconds:.1f} s to import, which every command waits for"
        return replace(transport, reason=words, remedy="have it import its engines, and torch, only when they are used")
    return transport


def _as_role(plugin: Plugin, role: Role) -> Transport:
    state = plugin.usable(role)
    try:
        if not plugin.engines(role) and state.state == "ready":
            return replace(state, state="unavailable", reason=f"it has no {role} engine")
    except TransportBroken as error:
        return _broken(plugin.transport, error.__cause__, f"weightwire_register_{role}_engines")
    return state


def _either(worker: Transport, trainer: Transport) -> Transport:
    if worker.state == trainer.state:
        return worker
    if trainer.state == "ready":
        return replace(worker, state="ready", reason=f"not as a worker: {worker.reason}")
    if worker.state == "ready":
        return replace(trainer, state="ready", reason=f"not as a trainer: {trainer.reason}")
    return worker if worker.state == "broken" else trainer


def strict() -> bool:
    """Whether `WEIGHTWIRE_STRICT=1` makes an error of a transport that cannot be had and nobody asked for."""
    return os.environ.get("WEIGHTWIRE_STRICT", "") not in ("", "0")


def check_all() -> None:
    """Raise for the first installed transport that is in conflict, incompatible or broken."""
    for transport, _ in survey():
        if transport.state in ("conflict", "incompatible", "broken"):
            raise transport.error()


def _load(transport: Transport) -> Plugin | Transport:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(TransportHooks)
    hooks = cast(TransportHooks, manager.hook)
    began = time.perf_counter()
    try:
        module = _imported(transport)
        seconds = time.perf_counter() - began
        manager.register(module, name=transport.qualified)
        spec = hooks.weightwire_transport()
        if not isinstance(spec, TransportSpec):
            raise TypeError(f"weightwire_transport answered {spec!r}, not a TransportSpec")
        major, minor = spec.api_version
        if major != API_VERSION[0] or minor > API_VERSION[1]:
            wanted, held = (".".join(map(str, version)) for version in (spec.api_version, API_VERSION))
            return _incompatible(transport, f"its plugin is written for API {wanted}, this weightwire has API {held}")
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        return _incompatible(transport, str(error), error)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return _broken(transport, error, "its plugin module")
    declared = {spec.backend, *spec.aliases}
    if declared != transport.names:
        reason = f"it declares {sorted(declared)} and its entry points say {sorted(transport.names)}"
        return replace(transport, state="broken", reason=reason, remedy=f"reinstall {transport.distribution}")
    return Plugin(replace(transport, name=spec.backend, aliases=spec.aliases), spec, hooks, seconds)


def _imported(transport: Transport) -> object:
    try:
        return transport.entry.load()
    except SystemExit as error:
        raise RuntimeError(f"it tried to end the process with {error!r}") from error


def _incompatible(transport: Transport, reason: str, cause: Exception | None = None) -> Transport:
    remedy = f"pip install --upgrade weightwire {transport.distribution}"
    return replace(transport, state="incompatible", reason=reason, remedy=remedy, cause=cause)


def _broken(transport: Transport, error: BaseException | None, where: str) -> Transport:
    reason = f"{where} raised {type(error).__name__}: {error}"
    remedy = f"weightwire doctor {transport.name} shows where"
    return replace(transport, state="broken", reason=reason, remedy=remedy, cause=error)
