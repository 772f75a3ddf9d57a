"""Drives a stock vLLM server, or anything that speaks as one, over its CUDA IPC wire.

    init     {"packed": bool}, nothing else
    round    start, update_weights (one with every parameter, or packed one for each fill of one buffer), finish
    update   {"names", "dtype_names", "shapes", "ipc_handles" or "ipc_handles_pickled", packed: "tensor_sizes"}

A call that has returned has been carried out: the server has read the memory. Every trainer rank exports everything,
since each worker reads from its own GPU; rank 0 sends all handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta
from weightwire.source import as_bytes
from weightwire.stock_trainer import StockTrainer
from weightwire_ipc.handles import HandleArguments
from weightwire_ipc.messages import IPCTrainerInitInfo
from weightwire_ipc.pickled import VARIABLE
from weightwire_ipc.stock_exporter import StockExporter
from weightwire_ipc.stock_update import cut_chunks, merge_handles, speaks_json, stock_update

Handles = dict[str, HandleArguments]


class StockIPCTrainer(StockTrainer[IPCTrainerInitInfo]):
    """Sends weights to a stock vLLM server on the same GPU; to one worker on each GPU, since an export is for one."""

    init_info_cls = IPCTrainerInitInfo
    needs = f"{StockTrainer.needs}, and {VARIABLE}=1 for handles over HTTP"
    symptoms = (*StockTrainer.symptoms, VARIABLE)

    make_exporter: Callable[[], StockExporter] = StockExporter
    _chunks: list[list[int]]
    _exporter: StockExporter

    @property
    def path(self) -> str:
        """The way the bytes take, for the report."""
        return "CUDA IPC (vLLM's wire)"

    def _configure(self, info: IPCTrainerInitInfo) -> None:
        super()._configure(info)
        self._chunks = cut_chunks(self.metadata, info.buffer_bytes("device")) if info.packed else []
        self._exporter = self.make_exporter()

    def open_server(self, deadline: Deadline) -> None:
        """Tell the server whether memory comes packed; there is nothing to connect."""
        self.initialise_server({"packed": self.init_info.packed}, deadline)

    def end_round(self) -> None:
        """Drop every export."""
        self._exporter.release()

    def transmit(self, number: int, deadline: Deadline) -> int:
        """Export every parameter and have the server read it; returns the tensor bytes exported."""
        pairs = self.pairs()
        if self.init_info.packed:
            self._send_packed(pairs, deadline)
        else:
            self._send_whole(pairs, deadline)
        return self.total_bytes

    def _send_whole(self, pairs: Iterator[tuple[ParamMeta, torch.Tensor]], deadline: Deadline) -> None:
        """One update with a handle for each parameter's own storage, gathered copies held until the round is over."""

        def export() -> list[Handles]:
            return [dict([self._exporter.export(tensor)]) for _, tensor in pairs]

        self._publish(self.metadata, export, deadline)

    def _send_packed(self, pairs: Iterator[tuple[ParamMeta, torch.Tensor]], deadline: Deadline) -> None:
        """One update for each fill of one buffer, which is exported once."""
        handles: Handles = {}
        buffer = self._exporter.allocate(self.init_info.buffer_bytes("device"), getattr(self.source, "device", None))

        def fill(metas: Sequence[ParamMeta]) -> list[Handles]:
            offset = 0
            for meta in metas:
                _, tensor = next(pairs)
                buffer[offset : offset + meta.nbytes].copy_(as_bytes(tensor))
                offset += meta.nbytes
            handles.update([] if handles else [self._exporter.export(buffer)])
            return [handles]

        for chunk in self._chunks:
            metas = [self.metadata[place] for place in chunk]
            self._publish(metas, partial(fill, metas), deadline, packed=True)
            self._exporter.collect()
        # The source may have more than it declares.
        self._group.together(lambda: dict.fromkeys(meta.name for meta, _ in pairs), deadline)

    def _publish(
        self,
        metas: Sequence[ParamMeta],
        export: Callable[[], list[Handles]],
        deadline: Deadline,
        *,
        packed: bool = False,
    ) -> None:
        """Have every rank export, and rank 0 the server read it all."""

        def step() -> dict[str, Any]:
            handles = export()
            self._exporter.fence()
            return {"handles": [{uuid: one.to_json() for uuid, one in handle.items()} for handle in handles]}

        answers = self._group.together(step, deadline)
        merged = merge_handles([answer["handles"] for answer in answers])
        update = stock_update(metas, merged, packed=packed, pickled=speaks_json(self.client))
        self._call(lambda: self.control.update(update, deadline), deadline)
