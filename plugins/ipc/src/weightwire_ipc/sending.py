"""One round of one sender: which way each parameter goes, and the copies that this takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Literal, NamedTuple

import torch

from weightwire import faults
from weightwire.checksums import Checksums
from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta
from weightwire.packing import ALIGNMENT
from weightwire.source import as_bytes
from weightwire.source_check import are_plain, as_plain, is_plain
from weightwire.source_reader import PresentSource
from weightwire_ipc import sharing
from weightwire_ipc.copying import copy_spans, spans
from weightwire_ipc.device_segment import DeviceSegment, storages_of
from weightwire_ipc.exports import Exports
from weightwire_ipc.feed import Feed
from weightwire_ipc.guard import Guard
from weightwire_ipc.messages import IPCTrainerInitInfo
from weightwire_ipc.ring import Fill, RingWriter, plan_fills
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


class _Plain(Mapping[int, torch.Tensor]):
    """Tensors by row, made contiguous when they are asked for; the last one that had to be is kept."""

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: tuple[int, torch.Tensor] | None = None

    def __getitem__(self, row: int) -> torch.Tensor:
        tensor = self._tensors[row]
        if is_plain(tensor):
            return tensor
        if self._made is None or self._made[0] != row:
            self._made = None
            self._made = row, as_plain(tensor)
        return self._made[1]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Sending:
    """One round.

    Args:
        outgoing: What is sent.
        feed: To whom.
        info: Whether workers adopt, and the size of the ring.
        memory: Which memory the bytes go through.
        checksums: Notes what is sent, by place among all parameters.
        progress: Told the place of the latest parameter, and the bytes so far.
        deadline: Of the public call.

    Attributes:
        path: The way the bytes took, in words.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        feed: Feed,
        info: IPCTrainerInitInfo,
        memory: Memory,
        checksums: Checksums,
        progress: Callable[[int, int], None],
        deadline: Deadline,
    ) -> None:
        self._outgoing = outgoing
        self._feed = feed
        self._info = info
        self._memory = memory
        self._checksums = checksums
        self._progress = progress
        self._deadline = deadline
        self._sent = 0
        self.path = ""

    def run(self, prepared: Prepared | None, batches: Iterator[Batch], number: int) -> int:
        """Bring everything to all workers; returns the bytes.

        Args:
            prepared: What was seen of the source, if all of it is there at once.
            batches: Else it comes from here.
            number: Of the round.

        Raises:
            PeerLost: A worker is gone.
            TransferError: The weights changed meanwhile, or memory is lacking.
        """
        if prepared is not None:
            batches = iter([(self._outgoing.places, prepared.present)])
        if self._info.adopt:
            self._export(batches, number)
        else:
            self._hand_out(batches, prepared, number)
        self._feed.finish(number, self._deadline)
        if prepared is not None:
            prepared.guard.check()
            prepared.guard.end()
        if self._outgoing.rows:
            self._progress(self._outgoing.rows[-1][0], self._outgoing.nbytes)
        return self._outgoing.nbytes

    def _export(self, batches: Iterator[Batch], number: int) -> None:
        """Copy everything into a segment that nobody looks at, and have the workers take it over."""
        outgoing = self._outgoing
        export = outgoing.exports.idle()
        self._feed.keep(outgoing.exports.files(), self._deadline)
        segment = self._feed.give(export.file, self._deadline)
        # The workers map it meanwhile; they do not look at what is in it yet.
        self._feed.begin(number, self._deadline, adopt=segment, hold=export.hand_out())
        faults.reach("ipc.announced")
        for batch in batches:
            arrived = outgoing.mine(batch)
            self._copy(arrived, export.file.memory)
            self._note(arrived)
        self._feed.tell_filled(number, self._deadline)
        self.path = "shared memory, one copy for all that adopt it"

    def _copy(self, arrived: Sequence[tuple[int, torch.Tensor]], memory: torch.Tensor) -> None:
        offsets = self._outgoing.layout.offsets
        if all(tensor.device.type == "cpu" for _, tensor in arrived) and are_plain([one for _, one in arrived]):
            start = memory.data_ptr()
            targets = [start + offsets[row] for row, _ in arrived]
            sources = [tensor.data_ptr() for _, tensor in arrived]
            sizes = [tensor.nbytes for _, tensor in arrived]
            # What lies between two parameters of the segment is nobody's.
            copy_spans(spans(targets, sources, sizes, padding=ALIGNMENT - 1), self._deadline)
            return
        for row, tensor in arrived:
            self._deadline.check()
            target = memory[offsets[row] : offsets[row] + tensor.nbytes]
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _hand_out(self, batches: Iterator[Batch], prepared: Prepared | None, number: int) -> None:
        """Say where everything lies, and bring what lies in no segment through the ring."""
        outgoing = self._outgoing
        mine = None if prepared is None else prepared.mine
        route = outgoing.route(None, None, self._info, self._memory) if prepared is None else prepared.route
        if mine is not None and self._checksums.enabled:
            # Before anybody reads, so that a write meanwhile shows.
            self._note(list(enumerate(mine)))
        self._feed.tell_table(route.table, route.segments, self._deadline)
        ring = self._feed.ring(self._deadline) if route.through else None
        if self._memory == "device":
            torch.cuda.current_stream().synchronize()
        self._feed.begin(number, self._deadline)
        faults.reach("ipc.announced")
        if mine is None:
            self._stream(batches, ring, route.fills)
        elif ring is not None:
            through = _Plain({row: mine[place] for row, place in enumerate(route.through)})
            for fill in route.fills:
                self._fill(ring, fill, through, route.through)
        direct = len(outgoing.rows) - len(route.through)
        kind = "shared memory" if self._memory == "host" else "CUDA IPC"
        self.path = f"{kind}, {direct} parameters read in place, {len(route.through)} through a ring"

    def _stream(self, batches: Iterator[Batch], ring: RingWriter | None, fills: Sequence[Fill]) -> None:
        """Bring everything through the ring as the source makes it, and keep no tensor longer than needed."""
        due = deque(fills)
        here: dict[int, torch.Tensor] = {}
        for batch in batches:
            arrived = self._outgoing.mine(batch)
            here |= dict(arrived)
            self._note(arrived)
            while ring is not None and due and arrived and due[0].last <= arrived[-1][0]:
                fill = due.popleft()
                self._fill(ring, fill, here, range(len(self._outgoing.rows)))
                for row in fill.completes:
                    del here[row]
            self._deadline.check()
        assert not due, "every fill is complete when the source ends"

    def _fill(self, ring: RingWriter, fill: Fill, tensors: Mapping[int, torch.Tensor], rows: Sequence[int]) -> None:
        """Bring one fill to the workers; `rows` are those of the ring's rows."""
        ring.write(fill, tensors, self._deadline)
        faults.reach("ipc.slot")
        self._sent += fill.nbytes
        self._progress(self._outgoing.rows[rows[fill.last]][0], self._sent)

    def _note(self, arrived: Sequence[tuple[int, torch.Tensor]]) -> None:
        for row, tensor in arrived if self._checksums.enabled else ():
            self._checksums.add(self._outgoing.rows[row][0], [as_bytes(as_plain(tensor))])
