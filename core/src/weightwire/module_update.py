"""One open update of a sink: what is to come, what has come, and what commit will do with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from weightwire.dtensor import reshard
from weightwire.errors import UpdateRefused
from weightwire.inventory import Entry, Group, Turn, Views
from weightwire.layout import ParamMeta
from weightwire.patching import HeldPatches, ReadyPatch, apply_all, undo_all
from weightwire.sink import CommitReport
from weightwire.staging import count_users

Chosen = tuple[Entry, ParamMeta]


@dataclass(eq=False, slots=True)
class Update:
    """What is to come and what has come, by name.

    Attributes:
        chosen: Where each name goes.
        ignored: Names of the update that the model lacks and the sink ignores.
        landing: What `targets` gives out: contiguous, of full shape and the dtype of the wire.
        buffers: Those received into memory of their own, since they are cast, strided or cut on their way.
        staged: The storage that stands in for each group's live one.
        held: What is patched, and what keeps its values.
        exposed: Groups whose live storage was given out.
        repeated: The plan of the update before, if this one can only be its repetition with the storages exchanged.
    """

    chosen: dict[str, Chosen]
    ignored: frozenset[str] = frozenset()
    came: set[str] = field(default_factory=set)
    landing: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    staged: dict[Group, Views] = field(default_factory=dict)
    adopted: dict[str, torch.Tensor] = field(default_factory=dict)
    held: HeldPatches = field(default_factory=HeldPatches)
    exposed: set[Group] = field(default_factory=set)
    repeated: Plan | None = None
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

    def arrive_all(self, names: Sequence[str]) -> None:
        """Note that all of `names`, which are in this update, have come; that is cheaper than one by one.

        Raises:
            UpdateRefused: One had come before.
        """
        twice = () if self.came.isdisjoint(names) else self.came.intersection(names)
        expected = len(self.came) + len(names)
        self.came.update(names)
        if len(self.came) != expected:
            name = next(iter(twice), None) or next(name for name, count in Counter(names).items() if count > 1)
            raise UpdateRefused(f"{name!r} came twice in one update", parameter=name)

    def filled(self) -> Iterator[str]:
        """The names whose whole tensors were copied or received into our memory."""
        elsewhere = self.adopted.keys() | self.held.names | self.held.kept
        return (name for name in self.chosen if name not in elsewhere)

    @property
    def straight(self) -> bool:
        """Whether every name has landed where commit takes it from."""
        return len(self.landing) == len(self.chosen) and not (self.buffers or self.adopted or self.held)


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
    """A group that commit rebinds to `views`, unless somebody turns out to hold a view of its live storage.

    Attributes:
        written: The entries that came as a whole.
        patched: Those that were patched in `views`.
    """

    group: Group
    views: Views
    written: list[Entry]
    adopted: bool = False
    patched: list[Entry] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Plan:
    """What commit does, worked out by prepare so that readers wait for O(parameters) and nothing else.

    The lists from `tensors` to `before` run in parallel, so do those from `rebinds` to `known`.

    Attributes:
        tensors: The objects to rebind.
        after: Their new memory.
        before: Their old memory.
        rebinds: The groups these belong to.
        live: Handle of each group's live storage.
        known: How many references to it are accounted for.
        copies: Entry, source, and why it is not rebound.
        swapped: How many entries are rebound to what a sink allocated.
        adopted: How many are rebound to what was handed over.
        partial: Some storage was completed from the live one.
        half_copied: An error left some of the copies done.
        repeatable: It has run, and can be `turn`ed.
        idle: Handle of each group's spare storage, once it was turned.
        common: What its groups share, once it was turned.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)
    rebinds: list[Rebind] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    copies: list[tuple[Entry, torch.Tensor, str]] = field(default_factory=list)
    patches: list[ReadyPatch] = field(default_factory=list)
    swapped: int = 0
    adopted: int = 0
    partial: bool = False
    half_copied: bool = False
    repeatable: bool = False
    idle: list[int] = field(default_factory=list)
    common: Turn | None = None

    def add(self, rebind: Rebind, known_users: int) -> None:
        """Rebind a group, of whose live storage `known_users` tensors are accounted for."""
        self._bind(rebind)
        self.rebinds.append(rebind)
        self.live.append(rebind.group.storage._cdata)
        self.known.append(known_users + 1)  # the handle in the group

    def _bind(self, rebind: Rebind) -> None:
        old = rebind.group.views().tensors
        for entry, after, before in zip(rebind.group.entries, rebind.views.tensors, old, strict=True):
            self.tensors += entry.tensors
            self.after += [after] * len(entry.tensors)
            self.before += [before] * len(entry.tensors)
        self.adopted += rebind.adopted
        self.swapped += 0 if rebind.adopted else len(rebind.written)

    def give_way(self) -> None:
        """Copy, instead of rebinding, the groups whose live storage has other users than the known ones."""
        counts = count_users(self.live)
        if counts is None or counts == self.known:  # the usual case, and a tenth of the time
            return
        self._part()
        held = [users > known for users, known in zip(counts, self.known, strict=True)]
        everything = list(zip(self.rebinds, held, strict=True))
        self.tensors, self.after, self.before, self.swapped, self.adopted = [], [], [], 0, 0
        self.rebinds = [rebind for rebind, is_held in everything if not is_held]
        for rebind in self.rebinds:
            self._bind(rebind)
        for rebind in (rebind for rebind, is_held in everything if is_held):
            entries = dict.fromkeys((*rebind.written, *rebind.patched))
            sources = [(entry, rebind.views.tensors[entry.index]) for entry in entries]
            self.copies += [(entry, source, "views held elsewhere") for entry, source in sources]

    def run(self, sharded: nn.Module | None = None) -> None:
        """Patch, rebind, copy. An error undoes the first two; once copies have begun it leaves `half_copied`.

        Args:
            sharded: The model, where it has DTensors: FSDP2 may hold gathered copies of them.
        """
        if sharded is not None:
            reshard(sharded)
        try:
            apply_all(self.patches)
            for tensor, after in zip(self.tensors, self.after, strict=True):
                tensor.data = after
            for entry, source, _ in self.copies:
                self.half_copied, local = True, entry.local
                if local.numel():  # the box of an empty piece has no extent at all
                    local.copy_(source if source.shape == local.shape else entry.cut(source))
            self.half_copied = False
        except BaseException:
            for tensor, before in zip(self.tensors, self.before, strict=True):
                tensor.data = before
            undo_all(self.patches)
            raise

    def settle(self) -> None:
        """Note that it has run: what was live is received into next time, if a sink allocated it."""
        if self.common is not None:
            self.common.live = 1 - self.common.live
            return
        self.repeatable = not (self.copies or self.patches or self.partial)
        for rebind in self.rebinds:
            reusable = rebind.group.rebound(rebind.views, adopted=rebind.adopted)
            self.repeatable = self.repeatable and reusable

    def turn(self) -> None:
        """After `settle`: become the plan that rebinds everything to what was live before."""
        if self.common is None:
            self.common = Turn()
            for rebind in self.rebinds:
                rebind.group.join(self.common)
            self.idle = [rebind.group.storage._cdata for rebind in self.rebinds]
        self.after, self.before = self.before, self.after
        self.live, self.idle = self.idle, self.live

    def _part(self) -> None:
        """No longer change all groups over together."""
        if self.common is not None:
            self.common = None
            for rebind in self.rebinds:
                assert rebind.group.spare is not None, "what was turned has two storages"
                rebind.views = rebind.group.spare

    def report(self, began: float) -> CommitReport:
        """What was done since `began`, by `time.perf_counter`."""
        return CommitReport(
            seconds=time.perf_counter() - began,
            swapped=self.swapped,
            copied=len(self.copies),
            adopted=self.adopted,
            copied_because=Counter(reason for _, _, reason in self.copies),
        )


@dataclass(eq=False, slots=True)
class Repetition:
    """What an update takes over from the two before it when all bring the same: their storages just change places.

    Attributes:
        chosen: What they bring.
        plan: The last one's; None where not all that was live before may be received into.
        landing: Where the last one landed, live now.
        before: Where the one before landed, received into next.
    """

    chosen: dict[str, Chosen]
    plan: Plan | None
    landing: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor] | None
    turned: bool = False

    def offer(self, update: Update) -> None:
        """Give `update` its plan and its landing, if it is a repetition."""
        if self.chosen is update.chosen and self.before is not None and self.plan is not None:
            if not self.turned:
                self.plan.turn()
                self.turned = True
            update.repeated, update.landing = self.plan, self.before


def repetition(update: Update, plan: Plan, last: Repetition | None) -> Repetition | None:
    """What the update after `update`, which has just been committed by `plan`, may take over."""
    if not update.straight or not plan.rebinds or plan.copies or plan.partial:
        return None
    before = last.landing if last is not None and last.chosen is update.chosen else None
    return Repetition(update.chosen, plan if plan.repeatable else None, update.landing, before)
