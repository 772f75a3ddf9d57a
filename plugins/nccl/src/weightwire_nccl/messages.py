"""What nccl trainers and workers are initialised with, and what one update says. Field names are vLLM's."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from weightwire.errors import MessageError
from weightwire.messages import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo

UNIQUE_ID_BYTES = 128
PIECE_BYTES = 16 << 20
STOCK_BUFFER_BYTES = 1 << 30


def _check_buffers(size: int, count: int) -> None:
    if size < 1 or count < 1:
        raise MessageError(f"packed_buffer_size_bytes and packed_num_buffers must be positive, got {size} and {count}")


@dataclass(kw_only=True)
class NCCLWeightTransferInitInfo(WeightTransferInitInfo):
    """What a worker engine is initialised with.

    Attributes:
        master_address: Address of the trainer's rendezvous.
        master_port: Its port.
        rank_offset: Data-plane rank of the first worker of this server.
        world_size: Data-plane ranks: senders, then workers.
        nccl_unique_id_b64: Instead of address and port: a 128-byte NCCL id in standard base64.
        packed: Whether small parameters travel together.
        packed_buffer_size_bytes: Size of one ring buffer.
        packed_num_buffers: Number of ring buffers.

    Raises:
        MessageError: Both or neither way to meet, or a malformed id.
    """

    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int
    world_size: int
    nccl_unique_id_b64: str | None = field(default=None, repr=False)
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        has_address = self.master_address is not None and self.master_port is not None
        has_part = self.master_address is not None or self.master_port is not None
        if self.nccl_unique_id_b64 is not None:
            if has_part:
                raise MessageError("give either master_address and master_port or nccl_unique_id_b64, not both")
            self._check_unique_id(self.nccl_unique_id_b64)
        elif not has_address:
            raise MessageError("give master_address and master_port, or nccl_unique_id_b64")
        if not 0 < self.rank_offset < self.world_size:
            raise MessageError(f"rank_offset {self.rank_offset} must lie in [1, world_size {self.world_size})")
        _check_buffers(self.packed_buffer_size_bytes, self.packed_num_buffers)

    def _check_unique_id(self, text: str) -> None:
        try:
            size = len(base64.b64decode(text, validate=True))
        except binascii.Error as error:
            raise MessageError("nccl_unique_id_b64 is not standard base64") from error
        if size != UNIQUE_ID_BYTES:
            raise MessageError(f"nccl_unique_id_b64 holds {size} bytes, an NCCL id has {UNIQUE_ID_BYTES}")


@dataclass(kw_only=True)
class NCCLWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """One update message.

    Attributes:
        names: Parameter names in the order in which they travel; all three empty means those of init.
        dtype_names: Their dtypes, e.g. `"bfloat16"`.
        shapes: Their full shapes.

    Raises:
        MessageError: Lists of different lengths.
    """

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("dtype_names", "shapes"):
            if len(getattr(self, key)) != len(self.names):
                raise MessageError(f"{key} has {len(getattr(self, key))} elements for {len(self.names)} names")


@dataclass
class NCCLTrainerInitInfo(TrainerInitInfo):
    """What a trainer engine is initialised with.

    Attributes:
        master_address: Address that trainer rank 0 listens on and every other rank connects to.
        master_port: Its port; 0 lets the system choose, which needs a single trainer rank.
        world_size: Senders plus workers; None asks the client.
        packed: Let small parameters travel together.
        packed_buffer_size_bytes: Size of one ring buffer; also the size of the pieces that large parameters are cut
            into. None: 16 MiB; on vLLM's wire, where it is what a pack is cut at, 1 GiB.
        packed_num_buffers: Number of ring buffers; also how many pieces are in flight to one worker. None: 8, on
            vLLM's wire 2.
        collective: Send with one broadcast to all workers instead of point to point.
        stall_limit: Seconds without any progress after which a peer counts as stopped.
        wire: `"vllm"` drives a stock vLLM server, see `docs/reference/nccl.md`.
    """

    backend: ClassVar[str] = "nccl"

    master_address: str = "127.0.0.1"
    master_port: int = 0
    world_size: int | None = None
    packed: bool = True
    packed_buffer_size_bytes: int | None = None
    packed_num_buffers: int | None = None
    collective: bool = field(default=False, kw_only=True)
    stall_limit: float = field(default=5.0, kw_only=True)
    wire: Literal["weightwire", "vllm"] = field(default="weightwire", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_buffers(self.buffer_bytes, self.buffers)
        if self.stall_limit <= 0:
            raise MessageError(f"stall_limit must be positive, got {self.stall_limit}")

    @property
    def buffer_bytes(self) -> int:
        """Size of one buffer: as given, else the wire's own."""
        if self.packed_buffer_size_bytes is not None:
            return self.packed_buffer_size_bytes
        return STOCK_BUFFER_BYTES if self.wire == "vllm" else PIECE_BYTES

    @property
    def buffers(self) -> int:
        """Number of buffers: as given, else the wire's own."""
        if self.packed_num_buffers is not None:
            return self.packed_num_buffers
        return 2 if self.wire == "vllm" else 8
