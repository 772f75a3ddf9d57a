"""What a push would do to a server: what it would not take and why, what it lacks. Nothing moves."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weightwire.layout import ParamMeta, dtype_name
from weightwire_cli.servers import Server, Stored

_NEAREST = 3


@dataclass(frozen=True, slots=True)
class Refusal:
    """A parameter that would not be taken.

    Attributes:
        name: The parameter.
        why: In words.
        nearest: Names of the worker that are like it, where it has none of that name.
    """

    name: str
    why: str
    nearest: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What would become of a push to one server.

    Attributes:
        server: Its URL.
        info: What it says of itself.
        taken: How many parameters it would take.
        refused: Those it would not.
        lacking: Names that it has and the push would not bring: parameters, or perhaps buffers (see `details`).
        details: Whether the server told dtypes and shapes; without them only names were compared.
    """

    server: str
    info: Mapping[str, Any]
    taken: int
    refused: tuple[Refusal, ...] = ()
    lacking: tuple[str, ...] = ()
    details: bool = False

    @property
    def fits(self) -> bool:
        """Whether, as far as is known, the push would be taken."""
        return not self.refused and not self.lacking

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types."""
        return {**asdict(self), "fits": self.fits}


@dataclass(slots=True)
class _Held:
    """Everything that a server has, by every name."""

    stored: dict[str, Stored | None] = field(default_factory=dict)
    required: list[tuple[str, ...]] = field(default_factory=list)


def plan_push(server: Server, metadata: Sequence[ParamMeta], *, partial: bool) -> Plan:
    """Compare what would be sent with what a server has.

    A server that tells dtypes and shapes (`/weight_info?parameters=true`) is asked for them; of any other the names
    in its checksums are taken, which it has to compute.

    Raises:
        WeightwireError: The server does not answer, or its weights are torn.
    """
    info = server.weight_info()
    parameters = server.parameters()
    held = _held(parameters, server.checksums() if parameters is None else {})
    refused = [refusal for meta in metadata if (refusal := _refusal(meta, held, info)) is not None]
    sent = {meta.name for meta in metadata}
    lacking = [] if partial else [names[0] for names in held.required if sent.isdisjoint(names)]
    return Plan(
        server=server.base_url,
        info=info,
        taken=len(metadata) - len(refused),
        refused=tuple(refused),
        lacking=tuple(lacking),
        details=parameters is not None,
    )


def _held(parameters: Mapping[str, Mapping[str, Stored]] | None, checksums: Mapping[str, Mapping[str, str]]) -> _Held:
    held = _Held()
    seen: set[str] = set()
    for records in (parameters or {}).values():
        for name, stored in records.items():
            names = stored.names or (name,)
            held.stored |= dict.fromkeys((name, *names), stored)
            if name not in seen and not stored.buffer:
                held.required.append((name, *names))
            seen.add(name)
    for sums in checksums.values():
        held.required += [(name,) for name in sums if name not in held.stored]
        held.stored |= dict.fromkeys(sums)
    return held


def _refusal(meta: ParamMeta, held: _Held, info: Mapping[str, Any]) -> Refusal | None:
    if meta.name not in held.stored:
        nearest = tuple(difflib.get_close_matches(meta.name, held.stored, n=_NEAREST))
        return Refusal(meta.name, "the worker has no such parameter", nearest)
    stored = held.stored[meta.name]
    if stored is None:
        return None
    if stored.shape != meta.shape:
        return Refusal(meta.name, f"shape {meta.shape} here, {stored.shape} there")
    dtype = dtype_name(meta.dtype)
    if stored.dtype != dtype and not info.get("cast"):
        return Refusal(meta.name, f"{dtype} here, {stored.dtype} there")
    return None
