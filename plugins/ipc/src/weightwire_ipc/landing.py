"""Where one round's parameters land in a worker: in the sink's targets, or in memory that is then loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from weightwire.checksums import Checksums
from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta
from weightwire.packing import unpack_chunk
from weightwire.sink import WeightSink
from weightwire.source import as_bytes
from weightwire.staging import ALIGNMENT
from weightwire_ipc.copying import Span, copy_bytes, copy_spans, spans
from weightwire_ipc.ring import Fill

_REMEMBERED = 4


class Lying:
    """Parameters that lie in memory that was handed over.

    Args:
        rows: Place among all parameters, and metadata.
        memory: Of each, the segment it lies in: 1-D uint8.
        offsets: Of each, where in it.
    """

    def __init__(
        self, rows: Sequence[tuple[int, ParamMeta]], memory: Sequence[torch.Tensor], offsets: Sequence[int]
    ) -> None:
        self.rows = rows
        self.names = [meta.name for _, meta in rows]
        self._memory = memory
        self._offsets = offsets
        self._sizes = [meta.nbytes for _, meta in rows]
        self._copies: dict[tuple[int, ...], list[Span]] = {}
        self._tensors: dict[str, torch.Tensor] | None = None
        starts = {id(one): one.data_ptr() for one in memory}
        self._addresses = [starts[id(one)] + offset for one, offset in zip(memory, offsets, strict=True)]
        self.on_host = all(one.device.type == "cpu" for one in {id(one): one for one in memory}.values())

    def content(self, row: int) -> torch.Tensor:
        """The bytes of one."""
        start = self._offsets[row]
        return self._memory[row][start : start + self._sizes[row]]

    def tensor(self, row: int) -> torch.Tensor:
        """One of them."""
        meta = self.rows[row][1]
        return self.content(row).view(meta.dtype).view(meta.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name, made once."""
        if self._tensors is None:
            self._tensors = {name: self.tensor(row) for row, name in enumerate(self.names)}
        return self._tensors

    def copies_to(self, targets: Sequence[torch.Tensor], *, padding: int) -> list[Span]:
        """How to copy all to memory of this host; worked out once for targets at the same addresses."""
        addresses = tuple(map(torch.Tensor.data_ptr, targets))
        copies = self._copies.get(addresses)
        if copies is None:
            if len(self._copies) == _REMEMBERED:
                self._copies.clear()
            copies = self._copies[addresses] = spans(addresses, self._addresses, self._sizes, padding=padding)
        return copies


class Landing:
    """One round of one worker.

    Args:
        sink: Takes the weights.
        names: All parameters of the round.
        device: Where the model lives.
        checksums: Notes what arrived, by place in `names`.
        deadline: Of the public call.
    """

    def __init__(
        self,
        sink: WeightSink,
        names: list[str],
        device: torch.device,
        checksums: Checksums,
        deadline: Deadline,
    ) -> None:
        self._sink = sink
        self._device = device
        self._checksums = checksums
        self._deadline = deadline
        self._names = names
        self._loose: dict[str, torch.Tensor] = {}
        self._copies: dict[Lying, list[Span]] = {}

    @cached_property
    def targets(self) -> Mapping[str, torch.Tensor]:
        """The sink's own memory to copy to; asked for only where something is copied."""
        sink = self._sink
        return sink.targets(self._names) if "targets" in sink.capabilities else {}

    @property
    def adopts(self) -> bool:
        """Whether the sink can take memory over."""
        return "adopt" in self._sink.capabilities

    def adopt(self, lying: Lying) -> None:
        """Hand memory over."""
        views = lying.tensors()
        for place, meta in lying.rows if self._checksums.enabled else ():
            self._checksums.add(place, [as_bytes(views[meta.name])])
        self._sink.adopt(views)

    def ready(self, lying: Lying) -> None:
        """Work out how to copy parameters, before it is known whether they are all there."""
        if (targets := self._targets_of(lying)) is not None:
            self._copies[lying] = lying.copies_to(targets, padding=self._padding)

    def read(self, lying: Lying) -> bool:
        """Copy parameters from where they lie, which must stay as it is meanwhile.

        Returns:
            Whether the sink was shown that memory, instead of having it copied.
        """
        if lying not in self._copies:
            self.ready(lying)
        copies = self._copies.get(lying)
        if copies is not None:
            copy_spans(copies, self._deadline)
            self._arrived(lying.rows, lying.names)
            return False
        shown = False
        for row, (place, meta) in enumerate(lying.rows):
            self._deadline.check()
            target = self.targets.get(meta.name)
            if target is None:
                self._load(place, meta, lying.tensor(row))
                shown = True
            else:
                copy_bytes(as_bytes(target), lying.content(row))
                self._arrived([(place, meta)], [meta.name])
        return shown

    @property
    def _padding(self) -> int:
        """Bytes between two targets that may be written: staged, they are the sink's own, in place anybody's."""
        return ALIGNMENT - 1 if self._sink.staging == "staged" else 0

    def _targets_of(self, lying: Lying) -> list[torch.Tensor] | None:
        """The targets of all, if everything is in this host's memory."""
        if not lying.on_host or self._device.type != "cpu":
            return None
        try:
            return list(map(self.targets.__getitem__, lying.names))
        except KeyError:
            return None

    def take(self, slot: torch.Tensor, fill: Fill, rows: Sequence[tuple[int, ParamMeta]]) -> None:
        """Copy what a ring slot carries; `rows` are the parameters that go through the ring, by row."""
        if fill.pack is not None:
            metas = [meta for _, meta in rows]
            copied, views = unpack_chunk(slot, fill.pack, metas, self.targets)
            if copied:
                self._sink.received(copied)
            self._sink.load(views)
            arrived = dict(views)
            for row in fill.completes if self._checksums.enabled else ():
                place, meta = rows[row]
                bytes_here = arrived[meta.name] if meta.name in arrived else self.targets[meta.name]
                self._checksums.add(place, [as_bytes(bytes_here)])
            return
        for piece in fill.pieces:
            into = as_bytes(self._whole(rows[piece.row][1]))
            content = slot[piece.offset : piece.offset + piece.nbytes]
            copy_bytes(into[piece.start : piece.start + piece.nbytes], content)
        for row in fill.completes:
            place, meta = rows[row]
            if meta.name in self._loose:
                self._load(place, meta, self._loose.pop(meta.name))
            else:
                self._arrived([(place, meta)], [meta.name])

    def _whole(self, meta: ParamMeta) -> torch.Tensor:
        """The whole of a parameter that arrives in parts."""
        target = self.targets.get(meta.name)
        if target is not None:
            return target
        if meta.name not in self._loose:
            self._loose[meta.name] = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
        return self._loose[meta.name]

    def _arrived(self, rows: Sequence[tuple[int, ParamMeta]], names: list[str]) -> None:
        for place, meta in rows if self._checksums.enabled else ():
            self._checksums.add(place, [as_bytes(self.targets[meta.name])])
        if names:
            self._sink.received(names)

    def _load(self, place: int, meta: ParamMeta, tensor: torch.Tensor) -> None:
        self._checksums.add(place, [as_bytes(tensor)])
        self._sink.load([(meta.name, tensor)])
