"""What a sender keeps from round to round: its parameters, the way that each goes, and segments to adopt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Literal, NamedTuple

import torch

from weightwire.layout import ParamMeta
from weightwire.packing import ALIGNMENT
from weightwire.source_check import is_plain
from weightwire.source_reader import PresentSource
from weightwire_ipc import sharing
from weightwire_ipc.device_segment import DeviceSegment, storages_of
from weightwire_ipc.exports import Exports
from weightwire_ipc.guard import Guard
from weightwire_ipc.messages import IPCTrainerInitInfo
from weightwire_ipc.ring import Fill, plan_fills
from weightwire_ipc.table import RING, Layout, compact, locate

Memory = Literal["host", "device"]
Batch = tuple[list[int], list[torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The way that each parameter goes.

    Attributes:
        pointers: Where the parameters were; None where nobody could read them there.
        shared: The segments of `share` that there were.
        segments: Segments that some lie in.
        table: Row by row, place in `segments` and offset.
        through: Rows that go through the ring.
        fills: What the ring carries; its rows are places in `through`.
    """

    pointers: list[int] | None
    shared: list[sharing.SharedSegment]
    segments: Sequence[sharing.SharedSegment | DeviceSegment]
    table: torch.Tensor
    through: list[int]
    fills: list[Fill]


class Prepared(NamedTuple):
    """A source that is there all at once.

    Attributes:
        present: All tensors that this rank owns.
        mine: Those that it sends, row by row.
        route: Their ways.
        guard: Keeps them as they are.
    """

    present: list[torch.Tensor]
    mine: list[torch.Tensor]
    route: Route
    guard: Guard


class Outgoing:
    """What a sender keeps from round to round, whatever becomes of its links.

    Args:
        owned: What this rank owns: place among all parameters, and metadata.
        rank: This trainer rank, which sends what it is the first owner of.
    """

    def __init__(self, owned: Sequence[tuple[int, ParamMeta]], rank: int) -> None:
        self.places = [place for place, _ in owned]
        self.rows = [row for row in owned if row[1].first_owner == rank]
        self.metas = [meta for _, meta in self.rows]
        self.row_of = {place: row for row, (place, _) in enumerate(self.rows)}
        self.sizes = torch.tensor([meta.nbytes for meta in self.metas], dtype=torch.int64)
        self.nbytes = int(self.sizes.sum())
        self._route: Route | None = None
        self._exports: Exports | None = None

    @cached_property
    def layout(self) -> Layout:
        """How they lie in a segment for workers to adopt."""
        return Layout(self.metas, align=ALIGNMENT)

    @property
    def exports(self) -> Exports:
        """The segments for workers to adopt."""
        if self._exports is None:
            self._exports = Exports(self.layout.nbytes)
        return self._exports

    def mine(self, batch: Batch) -> list[tuple[int, torch.Tensor]]:
        """Row and tensor of those that this rank sends."""
        places, tensors = batch
        rows = map(self.row_of.get, places)
        return [(row, tensor) for row, tensor in zip(rows, tensors, strict=True) if row is not None]

    def prepare(self, source: PresentSource, info: IPCTrainerInitInfo, memory: Memory) -> Prepared:
        """Look at a source that is there all at once, and have it stay as it is until the guard is let go.

        Raises:
            SourceMismatch: It is not what its metadata declares.
            TransferError: An optimizer is writing it.
        """
        guard = Guard(source.tensors)
        pointers: list[int] = []

        def note(tensors: Sequence[torch.Tensor], plain: bool) -> None:
            pointers.extend(map(torch.Tensor.data_ptr if plain else _pointer, tensors))
            guard.note(tensors)

        try:
            source.look(note)
            present, mine = source.tensors, source.tensors
            if len(self.rows) < len(self.places):
                chosen = [place in self.row_of for place in self.places]
                mine, pointers = list(compress(present, chosen)), list(compress(pointers, chosen))
            return Prepared(present, mine, self.route(mine, pointers, info, memory), guard)
        except BaseException:
            guard.end()
            raise

    def route(
        self,
        tensors: Sequence[torch.Tensor] | None,
        pointers: list[int] | None,
        info: IPCTrainerInitInfo,
        memory: Memory,
    ) -> Route:
        """The way of `tensors`, one for each row, and where they lie; None if they are not there all at once."""
        shared = sharing.segments() if memory == "host" else []
        if not (shared if memory == "host" else not info.packed):
            pointers = None
        known = self._route
        if known is not None and known.pointers == pointers and known.shared == shared:
            return known
        segments: Sequence[sharing.SharedSegment | DeviceSegment] = shared
        if pointers is None or tensors is None:
            segments, table = [], torch.full((len(self.rows), 2), RING, dtype=torch.int64)
        else:
            segments = shared if memory == "host" else storages_of(tensors)
            table, used = compact(locate(pointers, self.sizes, [(one.start, one.nbytes) for one in segments]))
            segments = [segments[number] for number in used]  # others are no business of the workers
        through = (table[:, 0] == RING).nonzero().flatten().tolist()
        fills = plan_fills([self.metas[row] for row in through], info.buffer_bytes(memory))
        self._route = Route(pointers, shared, segments, table, through, fills)
        return self._route

    def close(self) -> None:
        """Give the exported segments up."""
        if self._exports is not None:
            self._exports.close()


def _pointer(tensor: torch.Tensor) -> int:
    """Where it lies; 0 if its bytes there are not the ones to send."""
    return tensor.data_ptr() if is_plain(tensor) else 0
