"""Drives a stock vLLM server, or anything that speaks as one, over its NCCL wire.

    init     {"rank_offset": 1, "world_size", "nccl_unique_id_b64", "packed", "packed_buffer_size_bytes",
             "packed_num_buffers"}, while the communicator is made
    round    start, update_weights {"names", "dtype_names", "shapes"} while the bytes are broadcast, finish

Only trainer rank 0 is in the communicator; the others read the source to its end, so that gathers line up. The names
are told in full each time: vLLM 0.33 may leave out what repeats, 0.32 takes that for an update of nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import torch

from weightwire.control_call import ControlCall
from weightwire.deadline import Deadline
from weightwire.errors import MetadataError
from weightwire.fleet import worker_count
from weightwire.layout import ParamMeta, dtype_name
from weightwire.report import ProgressEvent
from weightwire.stock_packing import cut_packs, packed_broadcast_producer
from weightwire.stock_trainer import StockTrainer
from weightwire_nccl.broadcaster import Broadcaster, NCCLBroadcaster
from weightwire_nccl.messages import NCCLTrainerInitInfo

Pairs = Iterator[tuple[ParamMeta, torch.Tensor]]

NCCL_DTYPES: Final = frozenset(
    {
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float8_e4m3fn,
    }
)
"""What vLLM broadcasts unpacked."""


class StockNCCLTrainer(StockTrainer[NCCLTrainerInitInfo]):
    """Broadcasts weights to all workers of stock vLLM servers."""

    init_info_cls = NCCLTrainerInitInfo
    needs = f"{StockTrainer.needs}, and vLLM 0.32 or later to be given an NCCL id"
    symptoms = (*StockTrainer.symptoms, "nccl_unique_id_b64")

    make_broadcaster: Callable[[torch.device | None, int], Broadcaster] = NCCLBroadcaster
    _broadcaster: Broadcaster | None = None
    _sent = 0

    @property
    def path(self) -> str:
        """The way the bytes take, for the report."""
        return "NCCL (vLLM's wire)"

    def owning_ranks(self, count: int) -> range:
        """Rank 0 sends everything."""
        return range(1)

    def _configure(self, info: NCCLTrainerInitInfo) -> None:
        super()._configure(info)
        if info.packed:
            check_alignment(self.metadata, info.buffer_bytes)
        else:
            check_dtypes(self.metadata)

    def open_server(self, deadline: Deadline) -> None:
        """Make a communicator with the server's workers, who join it inside the init call.

        Raises:
            TransportUnavailable: There is no `nccl4py`, or no GPU.
            MessageError: Nobody knows how many workers there are.
        """
        info = self.init_info
        world_size = 1 + worker_count(info, 1, self.control.world_size())
        window = info.buffers * info.buffer_bytes
        broadcaster = self.make_broadcaster(getattr(self.source, "device", None), window)
        message = {
            "rank_offset": 1,
            "world_size": world_size,
            "nccl_unique_id_b64": base64.b64encode(broadcaster.unique_id).decode(),
            "packed": info.packed,
            "packed_buffer_size_bytes": info.buffer_bytes,
            "packed_num_buffers": info.buffers,
        }
        opening = deadline.part(1.0, "init_weight_transfer_engine")
        call = ControlCall(lambda: self.initialise_server(message, opening), opening, what=opening.what)
        try:
            broadcaster.connect(world_size, opening)
            broadcaster.warm_up(opening)
            call.result()
        except BaseException:
            call.conclude()
            broadcaster.abort()
            raise
        self._broadcaster = broadcaster

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """End the communicator."""
        broadcaster, self._broadcaster = self._broadcaster, None
        if broadcaster is not None:
            broadcaster.abort()

    # A round

    def transmit(self, number: int, deadline: Deadline) -> int:
        """Broadcast every parameter from rank 0; returns the tensor bytes this rank sent."""

        def step() -> dict[str, Any]:
            if self.is_sender:
                with self.explained():
                    self._broadcast(deadline)
            else:
                for _ in self.pairs():
                    deadline.check()
            return {}

        self._group.together(step, deadline)
        return self._sent if self.is_sender else 0

    def _broadcast(self, deadline: Deadline) -> None:
        # A part, so that the failure of the call ends this and not the ranks' hearing of it.
        moving = deadline.part(1.0, "update_weights")
        update = stock_update(self.metadata)
        pairs = self.pairs()
        call = ControlCall(lambda: self.control.update(update, moving), moving, what=moving.what)
        try:
            self._send_all(pairs, moving)
            call.result()
        except BaseException as error:
            call.conclude()
            self.disconnect(error=error)
            if isinstance(error, Exception):
                self._read_to_the_end(pairs, deadline)
            raise

    def _read_to_the_end(self, pairs: Pairs, deadline: Deadline) -> None:
        """After a failure: the other ranks are on their way through the source and may gather with this one."""
        if self._group.count > 1:
            with suppress(Exception):  # why the round failed is known
                for _ in pairs:
                    deadline.check()

    def _send_all(self, pairs: Pairs, deadline: Deadline) -> None:
        broadcaster = self._broadcaster
        assert broadcaster is not None
        self._sent = 0

        def send(tensor: torch.Tensor) -> None:
            broadcaster.send(tensor, deadline)
            self._sent += tensor.nbytes
            self.tell(
                ProgressEvent(
                    phase="transfer", parameters=len(self.metadata), bytes_done=self._sent, bytes=self.total_bytes
                )
            )

        if self.init_info.packed:
            named = ((meta.name, tensor) for meta, tensor in pairs)
            packed_broadcast_producer(named, send, buffer_size_bytes=self.init_info.buffer_bytes)
        else:
            for _, tensor in pairs:
                send(tensor.contiguous())
        broadcaster.flush(deadline)


def stock_update(metadata: Sequence[ParamMeta]) -> dict[str, Any]:
    """The message, with the keys of vLLM's NCCL update."""
    return {
        "names": [meta.name for meta in metadata],
        "dtype_names": [dtype_name(meta.dtype) for meta in metadata],
        "shapes": [list(meta.shape) for meta in metadata],
    }


def check_alignment(metadata: Sequence[ParamMeta], limit: int) -> None:
    """Refuse packs that vLLM cannot take apart: it fails where a tensor is misaligned, after the bytes have come.

    Args:
        metadata: The parameters, in order.
        limit: The limit of the cut rule, in bytes.

    Raises:
        MetadataError: A parameter would begin at no multiple of its dtype's size.
    """
    for places in cut_packs([meta.nbytes for meta in metadata], limit):
        offset = 0
        for meta in (metadata[place] for place in places):
            if offset % meta.dtype.itemsize:
                raise MetadataError(
                    f"parameter {meta.name!r} is {dtype_name(meta.dtype)} and would begin at byte {offset} of its "
                    "pack, where vLLM fails: pass packed=False, or a source that yields wider dtypes first",
                    transport="nccl",
                    parameter=meta.name,
                )
            offset += meta.nbytes


def check_dtypes(metadata: Sequence[ParamMeta]) -> None:
    """Refuse what vLLM cannot broadcast unpacked.

    Raises:
        MetadataError: A dtype that is not one of `NCCL_DTYPES`.
    """
    for meta in metadata:
        if meta.dtype not in NCCL_DTYPES:
            raise MetadataError(
                f"parameter {meta.name!r} is {dtype_name(meta.dtype)}, which vLLM takes packed only: leave out "
                "packed=False",
                transport="nccl",
                parameter=meta.name,
            )
