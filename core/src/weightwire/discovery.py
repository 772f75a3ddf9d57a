"""What is installed, read from entry points; nothing is imported here.

Three groups: `weightwire.transports` (backend name to plugin module), `weightwire.commands` and
`weightwire.bench`. The environment narrows them: `WEIGHTWIRE_PLUGINS` lists the distributions that may be
used (empty: none), `WEIGHTWIRE_DISABLE` lists backends or distributions that may not (`*`: everything that is
not weightwire's own). The scan is made on first use, kept, and made again by `refresh`.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import importlib_metadata

from weightwire import __version__, errors
from weightwire.requirements import normalized, unmet

GROUP: Final = "weightwire.transports"

FIRST_PARTY: Final[Mapping[str, str]] = {
    "nccl": "weightwire-nccl",
    "ipc": "weightwire-ipc",
    "sparse_nccl": "weightwire-sparse",
    "sparse": "weightwire-sparse",
    "nccl_m2n": "weightwire-m2n",
    "m2n": "weightwire-m2n",
    "sharded_rdt": "weightwire-rdt",
    "rdt": "weightwire-rdt",
}
"""weightwire's own backends and the distributions they come in, whether installed or not."""

_OWN = {*FIRST_PARTY.values(), "weightwire", "weightwire-server", "weightwire-cli", "weightwire-vllm"}

_VALUE = re.compile(r"\s*\w+(\.\w+)*\s*(:\s*\w+(\.\w+)*\s*)?(\[.*\]\s*)?")
"""What an entry point may point at: a module, or something in it."""

_UNREADABLE = (FileNotFoundError, KeyError, AttributeError, UnicodeDecodeError)

State = Literal["found", "disabled", "conflict", "incompatible", "broken", "unavailable", "ready"]

_ERRORS: Mapping[State, tuple[type[errors.PluginError], str]] = {
    "disabled": (errors.TransportDisabled, "is disabled"),
    "conflict": (errors.TransportConflict, "is not alone"),
    "incompatible": (errors.TransportIncompatible, "was made for another weightwire"),
    "broken": (errors.TransportBroken, "cannot be loaded"),
    "unavailable": (errors.TransportUnavailable, "cannot work here"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry point of an installed distribution.

    Attributes:
        name: Name of the entry.
        value: What it points at, `module` or `module:attribute`.
        distribution: The distribution that declares it, in PEP 503 form.
        version: Version of that distribution.
        requires: Its `Requires-Dist` lines.
        disabled: Which variable switches it off; empty if none does.
        damage: Why it cannot be read, as a clause; its name is then its distribution's.
    """

    name: str
    value: str
    distribution: str
    version: str
    requires: tuple[str, ...] = ()
    disabled: str = ""
    damage: str = ""

    def load(self) -> Any:
        """Import what the entry points at; whatever the import raises passes through."""
        return importlib_metadata.EntryPoint(self.name, self.value, GROUP).load()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One installed transport and what is known about it.

    Attributes:
        name: Backend name; until the plugin is loaded, the longest of its entry points' names.
        aliases: Its other names.
        entry: The entry point it was found by.
        state: How far it got: found, disabled, conflict, incompatible, broken, unavailable or ready.
        reason: Why it got no further, as a clause.
        remedy: What to do about it, as a clause.
        cause: The exception that made it broken.
    """

    name: str
    aliases: tuple[str, ...]
    entry: Entry
    state: State = "found"
    reason: str = ""
    remedy: str = ""
    cause: BaseException | None = field(default=None, compare=False, repr=False)

    @property
    def names(self) -> frozenset[str]:
        """Every name it may be asked for by."""
        return frozenset((self.name, *self.aliases))

    @property
    def distribution(self) -> str:
        """The distribution it came in, in PEP 503 form."""
        return self.entry.distribution

    @property
    def version(self) -> str:
        """Version of its distribution."""
        return self.entry.version

    @property
    def qualified(self) -> str:
        """The name that means this transport whatever else is installed: `"<distribution>:<name>"`."""
        return f"{self.distribution}:{self.name}"

    @property
    def package(self) -> str:
        """The package its plugin module lives in."""
        module = self.entry.value.partition(":")[0].strip()
        return module.rpartition(".")[0] or module

    def error(self) -> errors.PluginError:
        """The exception that says why this transport cannot be had; its cause is chained."""
        kind, words = _ERRORS[self.state]
        remedy = f" To mend it: {self.remedy}." if self.remedy else ""
        error = kind(f"Transport {self.name!r} of {self.distribution} {self.version} {words}: {self.reason}.{remedy}")
        error.__cause__ = self.cause
        return error


@functools.cache
def entries(group: str) -> tuple[Entry, ...]:
    """The entry points of a group, exact duplicates once, in order of name and distribution."""
    found = {}
    for point in _points(group):
        try:
            distribution, version = normalized(point.dist.metadata["Name"]), point.dist.version
        except _UNREADABLE:
            continue  # What an interrupted pip leaves behind is a folder, not a distribution.
        entry = Entry(point.name, point.value, distribution, version, tuple(point.dist.requires or ()))
        found[(entry.name, distribution, entry.value)] = replace(entry, disabled=_switched_off(entry))
    return tuple(entry for _, entry in sorted(found.items()))


def _points(group: str) -> Iterable[Any]:
    try:
        return importlib_metadata.entry_points(group=group)
    except Exception:  # noqa: BLE001 - one distribution's metadata cannot be read: the others' can
        return [point for one in _distributions() for point in _read(one)[0] if point.group == group]


def _distributions() -> Iterator[Any]:
    """What is installed, each once, the first on the path before others of its name."""
    seen: set[str] = set()
    for one in importlib_metadata.distributions():
        try:
            name = normalized(one.metadata["Name"])
        except _UNREADABLE:
            continue
        if name not in seen:
            seen.add(name)
            yield one


def _read(one: Any) -> tuple[Iterable[Any], str]:
    """The entry points of one distribution, or none and why they cannot be read."""
    try:
        return list(one.entry_points), ""
    except Exception as error:  # noqa: BLE001 - whatever a parser makes of a damaged file
        return [], f"its entry_points.txt cannot be read: {type(error).__name__}: {error}"


@functools.cache
def _damaged() -> tuple[Entry, ...]:
    """A stand-in for each distribution whose entry points cannot be read and that is of weightwire's kind.

    Whether it declares a transport nobody can tell; one that requires weightwire may, and says so.
    """
    try:
        importlib_metadata.entry_points()
    except Exception:  # noqa: BLE001 - as in _points
        return tuple(
            Entry(name := normalized(one.metadata["Name"]), "", name, one.version, damage=damage)
            for one in _distributions()
            if (damage := _read(one)[1]) and any(re.match(r"weightwire\b", line) for line in one.requires or ())
        )
    return ()


def _listed(variable: str) -> set[str] | None:
    value = os.environ.get(variable)
    return None if value is None else {part.strip() for part in value.split(",") if part.strip()}


def _switched_off(entry: Entry) -> str:
    allowed = _listed("WEIGHTWIRE_PLUGINS")
    if allowed is not None and entry.distribution not in {normalized(name) for name in allowed}:
        return "WEIGHTWIRE_PLUGINS does not list its distribution"
    for name in _listed("WEIGHTWIRE_DISABLE") or ():
        distribution, _, backend = name.rpartition(":")
        everything = name == "*" and entry.distribution not in _OWN
        same_distribution = normalized(name) == entry.distribution
        same_backend = backend == entry.name and normalized(distribution) in ("", entry.distribution)
        if everything or same_distribution or same_backend:
            return f"WEIGHTWIRE_DISABLE lists {name!r}"
    return ""


@functools.cache
def _scan() -> tuple[Transport, ...]:
    """The installed transports, each judged by itself."""
    grouped: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries(GROUP):
        grouped.setdefault((entry.distribution, entry.value), []).append(entry)
    grouped |= {(entry.distribution, ""): [replace(entry, disabled=_switched_off(entry))] for entry in _damaged()}
    return tuple(_judged(group) for _, group in sorted(grouped.items()))


def _judged(group: Sequence[Entry]) -> Transport:
    name, *aliases = sorted((entry.name for entry in group), key=lambda name: (-len(name), name))
    transport = Transport(name=name, aliases=tuple(aliases), entry=group[0])
    disabled = next((entry.disabled for entry in group if entry.disabled), "")
    if disabled:
        return replace(transport, state="disabled", reason=disabled, remedy="change the variable")
    requirement = unmet(transport.entry.requires, distribution="weightwire", version=__version__)
    if requirement:
        reason = f"it requires {requirement!r} and weightwire {__version__} is installed"
        remedy = f"pip install --upgrade weightwire {transport.distribution}"
        return replace(transport, state="incompatible", reason=reason, remedy=remedy)
    damage = transport.entry.damage
    if not damage and (not all(transport.names) or not _VALUE.fullmatch(transport.entry.value)):
        damage = f"its entry point {name!r} points at {transport.entry.value!r}, which is no module"
    if damage:
        return replace(transport, state="broken", reason=damage, remedy=f"reinstall {transport.distribution}")
    return transport


def transports() -> tuple[Transport, ...]:
    """The installed transports: found, disabled, in conflict, incompatible or broken. None is imported for it."""
    return tuple(_beside_others(transport) for transport in _scan())


def _beside_others(transport: Transport) -> Transport:
    rivals = [other for other in _scan() if other.state != "disabled" and other.names & transport.names]
    if transport.state == "disabled" or len(rivals) == 1:
        return transport
    shared = min(name for name in transport.names if sum(name in rival.names for rival in rivals) > 1)
    return conflict(transport, shared, rivals)


def conflict(transport: Transport, name: str, rivals: Iterable[Transport]) -> Transport:
    """`transport` in conflict with the others of `rivals` over `name`."""
    rivals = [rival for rival in rivals if name in rival.names]
    places = sorted(f"{rival.distribution} {rival.version} ({rival.entry.value})" for rival in rivals)
    ways = sorted({f'"{rival.distribution}:{name}"' for rival in rivals})
    remedy = f"ask for {' or '.join(ways)}, or list the distributions you want in WEIGHTWIRE_PLUGINS"
    if len(ways) == 1:
        remedy = "reinstall that distribution; one of its two entry points is a leftover"
    return replace(
        transport,
        state="conflict",
        reason=f"{name!r} is declared by {' and by '.join(places)}",
        remedy=remedy,
    )


def candidates(name: str) -> tuple[Transport, ...]:
    """The installed transports that answer to a plain or a qualified name, disabled ones too."""
    distribution, _, backend = name.rpartition(":")
    return tuple(
        transport
        for transport in _scan()
        if backend in transport.names and normalized(distribution) in ("", transport.distribution)
    )


def refresh() -> None:
    """Forget the scan: what was installed, removed or switched off since is seen by the next look."""
    importlib.invalidate_caches()
    entries.cache_clear()
    _damaged.cache_clear()
    _scan.cache_clear()
