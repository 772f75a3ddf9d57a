"""One open update of a `ModuleSink`: what is to come, what has come, and what commit will do with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from weightwire.errors import UpdateRefused
from weightwire.inventory import Entry, Group, Views, reshard
from weightwire.layout import ParamMeta
from weightwire.patching import ReadyPatch
from weightwire.sink import CommitReport, Patch

Chosen = tuple[Entry, ParamMeta]
Pair = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A tensor object of the model, its new memory, its old memory."""


@dataclass(eq=False, slots=True)
class Update:
    """What is to come and what has come, by name.

    Attributes:
        chosen: Where each name goes.
        ignored: Names of the update that the model lacks and the sink ignores.
        staged: The storage that stands in for each group's live one.
        buffers: Tensors received into memory of their own, since they are cast, strided or cut on their way.
        exposed: Groups whose live storage was given out.
    """

    chosen: dict[str, Chosen]
    ignored: frozenset[str]
    came: set[str] = field(default_factory=set)
    staged: dict[Group, Views] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    adopted: dict[str, torch.Tensor] = field(default_factory=dict)
    patches: dict[str, Patch] = field(default_factory=dict)
    exposed: set[Group] = field(default_factory=set)
    in_place: int = 0
    plan: Plan | None = None

    def find(self, name: str) -> Chosen | None:
        """Where `name` goes; None if this sink ignores it.

        Raises:
            UpdateRefused: It is not in this update.
        """
        chosen = self.chosen.get(name)
        if chosen is None and name not in self.ignored:
            raise UpdateRefused(f"{name!r} is not in this update", parameter=name)
        return chosen

    def arrive(self, name: str) -> None:
        """Note that `name` has come.

        Raises:
            UpdateRefused: It had come before.
        """
        if name in self.came:
            raise UpdateRefused(f"{name!r} came twice in one update", parameter=name)
        self.came.add(name)

    def filled(self) -> Iterator[str]:
        """The names whose whole tensors were copied or received into our memory."""
        return (name for name in self.chosen if name not in self.adopted and name not in self.patches)


def check_complete(expected: Collection[str], came: Collection[str]) -> None:
    """Compare what came with what was to come.

    Raises:
        UpdateRefused: Something never came.
    """
    if len(came) < len(expected):
        missing = [name for name in expected if name not in came]
        words = f"{len(missing)} parameters of the update never came: {', '.join(map(repr, missing[:3]))}"
        raise UpdateRefused(words, parameter=missing[0])


@dataclass(eq=False, slots=True)
class Rebind:
    """A group that commit rebinds to `views`, unless somebody turns out to hold a view of its live storage."""

    group: Group
    views: Views
    written: list[Entry]
    adopted: bool = False
    known_users: int = 0

    def pairs(self) -> Iterator[Pair]:
        """Every tensor object of the group, new and old."""
        old = self.group.views().tensors
        for entry, after, before in zip(self.group.entries, self.views.tensors, old, strict=True):
            for tensor in entry.tensors:
                yield tensor, after, before

    def done(self) -> None:
        """Note that it has happened: what was live is received into next time, if a sink allocated it."""
        group, before = self.group, self.group.views()
        group.live, group.storage, group.adopted = self.views, self.views.storage, self.adopted
        group.spare = before if before.ours and not self.adopted else None


@dataclass(eq=False, slots=True)
class Plan:
    """What commit does, worked out by prepare so that readers wait for O(parameters) and nothing else."""

    rebinds: list[Rebind] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    copies: list[tuple[Entry, torch.Tensor, str]] = field(default_factory=list)
    patches: list[ReadyPatch] = field(default_factory=list)
    half_copied: bool = False

    def add_rebind(self, rebind: Rebind) -> None:
        """Rebind this group too."""
        self.rebinds.append(rebind)
        self.pairs += rebind.pairs()

    def give_way(self, users: Callable[[torch.UntypedStorage], int]) -> None:
        """Copy, instead of rebinding, the groups whose live storage has other users than the known ones."""
        held = {rebind for rebind in self.rebinds if users(rebind.group.storage) > rebind.known_users}
        if held:
            self.rebinds = [rebind for rebind in self.rebinds if rebind not in held]
            self.pairs = [pair for rebind in self.rebinds for pair in rebind.pairs()]
            for rebind in held:
                sources = [(entry, rebind.views.tensors[entry.index]) for entry in rebind.written]
                self.copies += [(entry, source, "views held elsewhere") for entry, source in sources]

    def run(self, model: nn.Module) -> None:
        """Patch, rebind, copy. An error undoes the first two; once copies have begun it leaves `half_copied`."""
        try:
            for patch in self.patches:
                patch.apply()
            for tensor, after, _ in self.pairs:
                tensor.data = after
            if any(entry.picks is not None for entry, _, _ in self.copies):
                reshard(model)
            for entry, source, _ in self.copies:
                self.half_copied, local = True, entry.local
                local.copy_(source if source.shape == local.shape else entry.cut(source))
            self.half_copied = False
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        for tensor, _, before in self.pairs:
            tensor.data = before
        for patch in reversed(self.patches):
            patch.undo()

    def report(self, began: float) -> CommitReport:
        """What was done since `began`, by `time.perf_counter`."""
        return CommitReport(
            seconds=time.perf_counter() - began,
            swapped=sum(len(rebind.written) for rebind in self.rebinds if not rebind.adopted),
            copied=len(self.copies),
            adopted=sum(rebind.adopted for rebind in self.rebinds),
            copied_because=Counter(reason for _, _, reason in self.copies),
        )
