"""Drives a stock vLLM server, or anything that speaks as one, over its CUDA IPC wire.

    init     {"packed": bool}, nothing else; there is no link, no vote and no rollback
    round    start, update_weights (one with every parameter, or packed one for each fill of one buffer), finish
    update   {"names", "dtype_names", "shapes", "ipc_handles" or "ipc_handles_pickled", packed: "tensor_sizes"}

A call that has returned has been carried out: the server has read the memory. Every trainer rank exports everything,
since each worker reads from its own GPU; rank 0 sends all handles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Self

import torch

from weightwire.clients.protocol import PauseMode, VLLMWeightSyncClient
from weightwire.control_call import ControlCall
from weightwire.deadline import Deadline
from weightwire.errors import MetadataError, TransferError, Unsupported, describe
from weightwire.fleet import senders_of, trainer_count
from weightwire.layout import ParamMeta, check_metadata, total_bytes
from weightwire.report import ProgressEvent, RankReport, TransferReport
from weightwire.source import WeightSource, as_bytes
from weightwire.source_reader import SourceReader
from weightwire.trainer import TrainerWeightTransferEngine
from weightwire_ipc.handles import HandleArguments
from weightwire_ipc.messages import IPCTrainerInitInfo
from weightwire_ipc.pickled import VARIABLE
from weightwire_ipc.stock_exporter import StockExporter
from weightwire_ipc.stock_group import StockGroup
from weightwire_ipc.stock_update import cut_chunks, merge_handles, speaks_json, stock_update

Handles = dict[str, HandleArguments]

_NEEDS: Final = f"a vLLM server needs VLLM_SERVER_DEV_MODE=1 for these calls, and {VARIABLE}=1 for handles over HTTP"


class StockIPCTrainer(TrainerWeightTransferEngine[IPCTrainerInitInfo]):
    """Sends weights to a stock vLLM server on the same GPU; to one worker on each GPU, since an export is for one."""

    init_info_cls = IPCTrainerInitInfo
    consumes = "full"

    make_exporter: Callable[[], StockExporter] = StockExporter
    _group: StockGroup
    _chunks: list[list[int]]
    _initialised = False
    _closed = False
    _exporter: StockExporter

    @classmethod
    def trainer_init(
        cls,
        init_info: IPCTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Initialise the server behind `client` and return an engine that is ready to send.

        Called on every trainer rank.

        Raises:
            MessageError: Several trainer ranks that are not the default process group.
            MetadataError: No source, or one that this wire cannot carry.
            WeightwireError: The server refused; the message says what it needs.
        """
        engine = cls(client=client, source=source, is_sender=init_info.rank == 0, rank=init_info.rank)
        engine._configure(init_info)
        engine._initialise(Deadline(init_info.timeout, what="trainer_init"))
        return engine

    @property
    def path(self) -> str:
        """The way the bytes take, for the report."""
        return "CUDA IPC (vLLM's wire)"

    @property
    def linked(self) -> bool:
        """Whether the server was initialised and no round has failed since."""
        return self._initialised

    def _configure(self, info: IPCTrainerInitInfo) -> None:
        self.init_info = info
        if self.source is None or not self.source.implements_iter_full():
            raise MetadataError("wire='vllm' needs a source with iter_full: pass source=ModuleSource(model)")
        self.metadata = tuple(self.source.metadata)
        check_metadata(self.metadata)
        count = trainer_count(info)
        senders_of(self.metadata, trainers=count)
        for meta in self.metadata:
            if not all(map(meta.owned_by, range(count))):
                raise MetadataError(
                    f"parameter {meta.name!r} is owned by trainer ranks {meta.owners} only, and on vLLM's wire each of "
                    f"the {count} has to own every parameter: gather it first, or use wire='weightwire'",
                    parameter=meta.name,
                )
        self.total_bytes = total_bytes(self.metadata)
        self.reader = SourceReader(self.metadata, info.rank, self.consumes)
        self._chunks = cut_chunks(self.metadata, info.buffer_bytes("device")) if info.packed else []
        self._group = StockGroup(count, info.rank)
        self._exporter = self.make_exporter()

    def _initialise(self, deadline: Deadline) -> None:
        message = {"packed": self.init_info.packed}
        self._call(lambda: self.control.initialise(message, deadline), deadline)
        self._initialised = True

    # A round

    def send_weights(
        self,
        patches: Any = None,
        *,
        weight_version: str | None = None,
        pause: PauseMode | None = None,
        timeout: float | None = None,
    ) -> TransferReport:
        """Bring the server to this trainer's weights. A stock server that fails half-way is left half-way.

        Called on every trainer rank. After a round that failed the server is initialised again first.

        Args:
            patches: None: this wire carries whole weights.
            weight_version: A label for people, told to the server at the end.
            pause: Pause the server's readers around the update, in this mode.
            timeout: Deadline in seconds; None means the init info's.

        Raises:
            SourceMismatch: The source is not what it declared.
            WeightwireError: A rank or the server failed.
            DeadlineExceeded: The time is over.
        """
        if patches is not None:
            raise Unsupported(f"backend {self.backend!r} sends whole weights, not patches")
        if self._closed:
            raise TransferError("send_weights after shutdown: make a new engine with trainer_init")
        seconds = self.init_info.timeout if timeout is None else timeout
        deadline = Deadline(seconds, what="send_weights")
        with self._paused(pause, deadline):
            opened = not self._initialised
            if opened:
                self._initialise(deadline)
            try:
                return self._send_round(weight_version, deadline, reinitialised=opened)
            except BaseException:
                self._give_up(deadline)
                raise
            finally:
                self._exporter.release()

    def _send_round(self, label: str | None, deadline: Deadline, *, reinitialised: bool) -> TransferReport:
        seconds: dict[str, float] = {}
        with self._timed("begin", seconds):
            self._call(lambda: self.control.start(deadline), deadline)
        with self._timed("transfer", seconds), torch.no_grad():
            sent = self.transmit(self._round, deadline)
        with self._timed("finish", seconds):
            # What was exported is kept until the server has let go of it on every rank's GPU.
            self._call(lambda: self.control.finish(label, deadline), deadline)
        self._tell("done")
        number, self._round = self._round, self._round + 1
        return TransferReport(
            transport=self.backend,
            path=self.path,
            round=number,
            scope=getattr(self.source, "scope", "full"),
            parameters=len(self.metadata),
            bytes=self.total_bytes,
            seconds=seconds,
            label=label,
            revision={},
            previous=None,
            ranks=(RankReport(rank=f"trainer rank {self.rank}", bytes=sent, seconds=seconds),),
            reinitialised=reinitialised,
        )

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

    def _call(self, call: Callable[[], None], deadline: Deadline) -> None:
        """Have rank 0 call the server, and every rank hear how it went."""

        def step() -> dict[str, Any]:
            if self.is_sender:
                try:
                    call()
                except Exception as error:
                    told = describe(error, transport=self.backend)
                    if "404" in told.message or VARIABLE in told.message:
                        told.message += f" ({_NEEDS})"
                    if told is error:
                        raise
                    raise told from error
            return {}

        self._group.together(step, deadline)

    def _give_up(self, deadline: Deadline) -> None:
        """Ask the server to drop the update; a stock one cannot, and may stay with some new and some old weights."""
        self._initialised = False
        if self.is_sender:
            abort = ControlCall(lambda: self.control.abort(5.0), deadline, what="abort_weight_update")
            abort.conclude()
            abort.linger()

    # The rest

    def shutdown(self) -> None:
        """Send no more; the server goes on serving what it has. Idempotent."""
        self._initialised, self._closed = False, True

    @contextmanager
    def _timed(self, phase: str, seconds: dict[str, float]) -> Iterator[None]:
        self._tell(phase)
        began = time.perf_counter()
        yield
        seconds[phase] = time.perf_counter() - began

    def _tell(self, phase: str) -> None:
        if self.on_progress is not None:
            self.on_progress(ProgressEvent(phase=phase, parameters=len(self.metadata)))
