"""A check of the kit, and why it may be left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from weightwire.testing.conformance.stage import Stage

Group = Literal["contract", "bytes", "order", "versions", "fleet", "failure", "leak", "reuse"]

GROUPS: Final[tuple[Group, ...]] = ("contract", "bytes", "order", "versions", "fleet", "failure", "leak", "reuse")


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        group: What it belongs to.
        name: What it is about, in words joined by hyphens.
        run: The check; raises `Nonconforming` where the transport fails it.
        needs: Capabilities without which it is skipped.
        lacks: A capability with which it is skipped: it is about transports that do without.
        expensive: Whether it is left out unless everything is asked for.
        installed: Whether it is about a plugin, which a transport registered at run time has not.
    """

    group: Group
    name: str
    run: Callable[[Stage], None]
    needs: frozenset[str] = frozenset({"full", "cpu"})
    lacks: str = ""
    expensive: bool = False
    installed: bool = False

    def skipped(self, stage: Stage, *, everything: bool) -> str:
        """Why this check is left out; empty if it is run."""
        backend, declared = stage.subject.backend, stage.subject.declared()
        missing = sorted(self.needs - declared)
        if missing:
            return f"transport {backend!r} declares no capability {missing[0]!r}"
        if self.lacks in declared:
            return f"transport {backend!r} declares capability {self.lacks!r}, this is about those without"
        if self.installed and stage.subject.register is not None:
            return f"transport {backend!r} is registered at run time: there is no plugin to look at"
        if self.expensive and not everything:
            return "expensive: --weightwire-all runs it (weightwire check: --all)"
        return ""
