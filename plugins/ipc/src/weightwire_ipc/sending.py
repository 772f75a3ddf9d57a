"""One round of one sender: which way each parameter goes, and the copies that this takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from weightwire import faults
from weightwire.checksums import Checksums
from weightwire.deadline import Deadline
from weightwire.packing import ALIGNMENT
from weightwire.source import as_bytes
from weightwire.source_check import are_plain, as_plain, is_plain
from weightwire_ipc.copying import copy_spans, spans
from weightwire_ipc.feed import Feed
from weightwire_ipc.messages import IPCTrainerInitInfo
from weightwire_ipc.outgoing import Batch, Memory, Outgoing, Prepared
from weightwire_ipc.ring import Fill, RingWriter


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
        export = outgoing.exports.idle(self._deadline)
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
