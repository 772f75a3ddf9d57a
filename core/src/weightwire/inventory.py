"""What a model consists of, for a sink: its tensors, their names, and which of them share storage."""

from __future__ import annotations

import difflib
import operator
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from weightwire.dtensor import piece
from weightwire.errors import UpdateRefused
from weightwire.layout import Box, ParamMeta, dtype_name
from weightwire.sink import Held
from weightwire.staging import sha256

_LISTED = 3
_BLOCK = 1024
_DTYPE = operator.attrgetter("dtype")


@dataclass(eq=False, slots=True)
class Views:
    """One storage seen as the tensors of a group, in the order of its entries.

    Attributes:
        ours: A sink allocated it, so that it may be received into again.
    """

    storage: torch.UntypedStorage
    tensors: list[torch.Tensor]
    ours: bool


@dataclass(eq=False, slots=True)
class Turn:
    """Which of their two storages is live in the groups that share it: thousands change places by one assignment."""

    live: int = 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class Group:
    """The entries that live in one storage and so are rebound together.

    Attributes:
        pair: The live storage and the spare one; `turn` says which is which.
        adopted: The live storage was handed over by a transport: that others lie in it too is no wish of the model.
        copied_because: Why a rebind would not be seen; None where it is.
    """

    pair: list[Views | None]
    entries: list[Entry] = field(default_factory=list)
    adopted: bool = False
    copied_because: str | None = None
    turn: Turn = field(default_factory=Turn)

    @property
    def _live(self) -> Views:
        live = self.pair[self.turn.live]
        assert live is not None, "a group has live storage"
        return live

    @property
    def storage(self) -> torch.UntypedStorage:
        """The live one."""
        return self._live.storage

    def views(self) -> Views:
        """The live storage as tensors, kept so that a rebind can be undone and repeated."""
        live = self._live
        if not live.tensors:
            with torch.inference_mode(False):
                live.tensors += [entry.tensors[0].data for entry in self.entries]
        return live

    @property
    def spare(self) -> Views | None:
        """A second storage to receive into."""
        return self.pair[not self.turn.live]

    @spare.setter
    def spare(self, views: Views | None) -> None:
        self.pair[not self.turn.live] = views

    def rebound(self, views: Views, *, adopted: bool) -> bool:
        """Note that `views` are live now; returns whether those before may be received into, being a sink's own."""
        before = self._live
        reusable = before.ours and not adopted
        self.pair[self.turn.live], self.spare, self.adopted = views, before if reusable else None, adopted
        return reusable

    def join(self, turn: Turn) -> None:
        """Share `turn` from now on."""
        if self.turn.live != turn.live:
            self.pair.reverse()
        self.turn = turn

    def count_tensors(self) -> int:
        """How many tensors over the live storage are accounted for: the model's and our views."""
        return sum(len(entry.tensors) for entry in self.entries) + len(self.views().tensors)


@dataclass(eq=False, slots=True)
class Entry:
    """One tensor of a model under all its names.

    Attributes:
        tensors: The objects of the model that are this tensor: several where it is tied by storage.
        names: Its names in state-dict order; none for a buffer that is not persistent.
        index: Its place in `group`.
        direct: Contiguous, so that bytes may be received straight into it.
        dense: It fills an interval of its storage.
        box: Of a DTensor, the part of the full tensor that this rank has.
        copied_because: Why there is no `group`.
        refused: Why it takes no weights at all.
    """

    tensors: list[torch.Tensor]
    parameter: bool = False
    names: list[str] = field(default_factory=list)
    index: int = 0
    direct: bool = False
    dense: bool = False
    box: Box | None = None
    copied_because: str | None = None
    refused: str | None = None
    _group: weakref.ref[Group] | None = None

    @property
    def group(self) -> Group | None:
        """Its storage, which the inventory keeps; None where only `copy_` writes it.

        A cycle would keep views alive until the collector runs, and they would count as held elsewhere.
        """
        return None if self._group is None else self._group()

    def join(self, group: Group) -> None:
        """Become the next entry of `group`."""
        self._group, self.index = weakref.ref(group), len(group.entries)
        group.entries.append(self)

    @property
    def has_bytes(self) -> bool:
        """Whether `local` is plain memory."""
        return self.refused is None and (self._group is not None or self.box is not None)

    def lands(self, meta: ParamMeta) -> bool:
        """Whether bytes of the wire are received straight to where they belong."""
        return self.direct and meta.dtype == self.tensors[0].dtype

    @property
    def local(self) -> torch.Tensor:
        """The live tensor to write: a DTensor's piece."""
        tensor: Any = self.tensors[0]
        return tensor.detach() if self.box is None else piece(tensor)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """The part of `full` that this rank has."""
        return full if self.box is None else full[self.box.slices()]


@dataclass(eq=False, slots=True)
class Bound:
    """Side by side: tensor objects that can be rebound, views of the memory that each should have, and their dtypes."""

    tensors: list[torch.Tensor]
    memory: list[torch.Tensor]
    dtypes: list[torch.dtype]

    def unchanged(self) -> bool:
        """Whether each has its memory; looked at by the block, which stays in the processor's cache."""
        for start in range(0, len(self.tensors), _BLOCK):
            block = slice(start, start + _BLOCK)
            tensors = self.tensors[block]
            if list(map(_DTYPE, tensors)) != self.dtypes[block]:
                return False
            if not all(map(torch.Tensor.is_set_to, tensors, self.memory[block])):
                return False
        return True


@dataclass(eq=False, slots=True)
class Inventory:
    """All tensors of one model as they were found; `unchanged` says whether they still are so.

    Attributes:
        entries: In state-dict order.
        by_name: Under every name, those of wrappers included.
        inference: Some were made in inference mode, and may be written in it alone.
        sharded: Some are DTensors.
        places: Where the modules keep parameters, buffers and other modules.
        vacant: Where they keep none.
        found: What was there.
        bound: What `unchanged` compares; None until it is worked out.
    """

    entries: list[Entry] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    by_name: dict[str, Entry] = field(default_factory=dict)
    inference: bool = False
    sharded: bool = False
    places: list[dict[str, Any]] = field(default_factory=list)
    vacant: list[dict[str, Any]] = field(default_factory=list)
    found: list[object] = field(default_factory=list)
    bound: Bound | None = None
    _adopted_users: Counter[int] = field(default_factory=Counter)

    def unchanged(self) -> bool:
        """Whether the model still has the same tensors over the same memory."""
        if self.bound is None:
            pairs = [
                (tensor, view)
                for group in self.groups
                for entry, view in zip(group.entries, group.views().tensors, strict=True)
                for tensor in entry.tensors
            ]
            self.bound = _bound([tensor for tensor, _ in pairs], [view for _, view in pairs])
        found = list(chain.from_iterable(map(operator.methodcaller("values"), self.places)))
        return (
            len(found) == len(self.found)
            and all(map(operator.is_, found, self.found))
            and not any(self.vacant)
            and self.bound.unchanged()
        )

    def rebound(self, tensors: list[torch.Tensor], memory: list[torch.Tensor]) -> None:
        """Note that a commit has bound `tensors` to `memory`."""
        self._adopted_users.clear()
        if self.bound is not None and self.bound.tensors is tensors:
            self.bound.memory = memory
        elif tensors:
            complete = self.bound is not None and len(self.bound.tensors) == len(tensors)
            self.bound = _bound(tensors, memory) if complete else None

    def known_users(self, group: Group) -> int:
        """How many tensors over the live storage of `group` are accounted for."""
        if not group.adopted:
            return group.count_tensors()
        if not self._adopted_users:
            for other in [one for one in self.groups if one.adopted]:
                self._adopted_users[other.storage._cdata] += other.count_tensors()
        return self._adopted_users[group.storage._cdata]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The mode in which live tensors may be written."""
        with torch.inference_mode(self.inference), torch.no_grad():
            yield

    def checksums(self) -> dict[str, str]:
        """See `WeightSink.checksums`."""
        entries = [entry for entry in self.entries if entry.names and entry.has_bytes]
        return {entry.names[0]: sha256(entry.local) for entry in entries}

    def held(self) -> list[Held]:
        """See `WeightSink.inventory`."""
        return [
            Held(
                names=tuple(entry.names),
                dtype=entry.tensors[0].dtype,
                shape=tuple(entry.tensors[0].shape),
                local_shape=tuple(entry.local.shape),
                buffer=not entry.parameter,
            )
            for entry in self.entries
            if entry.names and entry.has_bytes
        ]

    def zero(self) -> None:
        """Fill every parameter with zeros."""
        with self.writing():
            for entry in self.entries:
                if entry.parameter and entry.has_bytes:
                    entry.local.zero_()

    def resolve(
        self, metadata: tuple[ParamMeta, ...], *, strict: bool, cast: bool, full: bool
    ) -> dict[str, tuple[Entry, ParamMeta]]:
        """The entry that each parameter goes to; without `strict` the unknown ones are left out.

        Raises:
            UpdateRefused: Naming the first parameter that is unknown, repeated, of other shape or dtype, or missing.
        """
        unknown = [meta.name for meta in metadata if meta.name not in self.by_name]
        if unknown and strict:
            raise self._unknown(unknown)
        chosen: dict[str, tuple[Entry, ParamMeta]] = {}
        taken: dict[Entry, str] = {}
        for meta in metadata:
            name, entry = meta.name, self.by_name.get(meta.name)
            if entry is None:
                continue
            if name in chosen:
                raise UpdateRefused(f"{name!r} occurs twice in the update", parameter=name)
            if (other := taken.setdefault(entry, name)) != name:
                words = f"{name!r} and {other!r} are one tied parameter here: send it under one of its names"
                raise UpdateRefused(words, parameter=name)
            _check(entry, meta, cast=cast)
            chosen[name] = (entry, meta)
        missing = [entry.names[0] for entry in self.entries if entry.parameter and entry not in taken]
        if strict and full and missing:
            listed = ", ".join(map(repr, missing[:_LISTED])) + (", ..." if len(missing) > _LISTED else "")
            words = f"a full update must bring every parameter; {len(missing)} are missing: {listed}"
            raise UpdateRefused(words, parameter=missing[0])
        return chosen

    def _unknown(self, names: list[str]) -> UpdateRefused:
        near = difflib.get_close_matches(names[0], self.by_name, n=_LISTED)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        more = f" ({len(names) - 1} more names are unknown)" if len(names) > 1 else ""
        return UpdateRefused(f"the model has no parameter {names[0]!r}{hint}{more}", parameter=names[0])


def _bound(tensors: list[torch.Tensor], memory: list[torch.Tensor]) -> Bound:
    return Bound(tensors, memory, list(map(_DTYPE, memory)))


def _check(entry: Entry, meta: ParamMeta, *, cast: bool) -> None:
    tensor, name = entry.tensors[0], meta.name
    if entry.refused is not None:
        raise UpdateRefused(f"{name!r} cannot take weights: {entry.refused}", parameter=name)
    if tuple(tensor.shape) != meta.shape:
        words = f"{name!r} has shape {tuple(tensor.shape)} here, and {meta.shape} in the update"
        raise UpdateRefused(words, parameter=name)
    if meta.dtype != tensor.dtype and not (cast and torch.can_cast(meta.dtype, tensor.dtype)):
        hint = "no cast between them is allowed" if cast else "a worker with cast=True converts"
        here, there = dtype_name(tensor.dtype), dtype_name(meta.dtype)
        raise UpdateRefused(f"{name!r} is {here} here, and {there} in the update; {hint}", parameter=name)


def check_tensor(name: str, meta: ParamMeta, tensor: torch.Tensor) -> None:
    """Compare a tensor that came with what was announced.

    Raises:
        UpdateRefused: They differ.
    """
    if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
        came = f"{tuple(tensor.shape)} {tensor.dtype}"
        words = f"{name!r} came as {came}, and was announced as {meta.shape} {meta.dtype}"
        raise UpdateRefused(words, parameter=name)
