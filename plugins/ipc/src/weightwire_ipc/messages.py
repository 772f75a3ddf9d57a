"""What ipc trainers and workers are initialised with, and what one update says. Field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from weightwire.errors import MessageError
from weightwire.messages import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo
from weightwire_ipc.pickled import decode_handles

HOST_BUFFER_BYTES = 4 << 20
DEVICE_BUFFER_BYTES = 128 << 20
STOCK_BUFFER_BYTES = 1 << 30


@dataclass(kw_only=True)
class IPCWeightTransferInitInfo(WeightTransferInitInfo):
    """What a worker engine is initialised with.

    Attributes:
        packed: Whether device memory arrives packed in one buffer, chunk by chunk; see `IPCTrainerInitInfo`.
    """

    packed: bool = False


@dataclass(kw_only=True)
class IPCWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """One update message. A weightwire trainer's has none of these fields; a stock trainer's has.

    Attributes:
        names: Parameter names.
        dtype_names: Their dtypes, e.g. `"bfloat16"`.
        shapes: Their shapes.
        ipc_handles: For each name a mapping from the GPU's uuid to the arguments of torch's `rebuild_cuda_tensor`;
            packed, one such mapping for all.
        ipc_handles_pickled: The same, pickled and in base64. Taken only where `VLLM_ALLOW_INSECURE_SERIALIZATION=1`,
            and read by a reader that builds nothing but these arguments; None once it is read.
        tensor_sizes: Packed: the bytes of each tensor in the buffer.

    Raises:
        MessageError: Lists of different lengths, or both or neither form of the handles.
    """

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    ipc_handles: list[dict[str, Any]] | dict[str, Any] | None = None
    ipc_handles_pickled: str | None = None
    tensor_sizes: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._read_handles()
        for key in ("dtype_names", "shapes", "tensor_sizes"):
            values = getattr(self, key)
            if values is not None and len(values) != len(self.names):
                raise MessageError(f"{key} has {len(values)} elements for {len(self.names)} names")
        if isinstance(self.ipc_handles, list) and len(self.ipc_handles) != len(self.names):
            raise MessageError(f"ipc_handles has {len(self.ipc_handles)} elements for {len(self.names)} names")

    @property
    def stock(self) -> bool:
        """Whether a stock vLLM trainer sent it."""
        return self.ipc_handles is not None

    def _read_handles(self) -> None:
        if self.ipc_handles_pickled is not None:
            if self.ipc_handles is not None:
                raise MessageError("give either ipc_handles or ipc_handles_pickled, not both")
            self.ipc_handles, self.ipc_handles_pickled = decode_handles(self.ipc_handles_pickled), None
        elif self.ipc_handles is None and (self.names or self.round is None):
            raise MessageError("give ipc_handles or ipc_handles_pickled")


@dataclass
class IPCTrainerInitInfo(TrainerInitInfo):
    """What a trainer engine is initialised with.

    Attributes:
        packed: Device memory only: copy into a bounded ring instead of exporting every parameter's own storage. Host
            memory that is not shared always goes through the ring.
        packed_buffer_size_bytes: Size of one ring buffer; None: 4 MiB in host memory, 128 MiB on a device, and on
            vLLM's wire, where it is the only one, 1 GiB.
        packed_num_buffers: Number of ring buffers.
        memory: Which memory the bytes go through: `"host"` (memory files) or `"device"` (CUDA IPC, both sides on one
            GPU); None: that which the source's first parameter lies in.
        adopt: Host memory only: write the weights into one of two exported segments that all workers of this host
            then compute on, instead of having each copy them. A worker that cannot, copies.
        socket_directory: Where the socket that memory files are handed over is made, for processes that do not share
            a network namespace; None makes one that has no file.
        wire: `"vllm"` drives a stock vLLM server, see `docs/reference/ipc.md`.
    """

    backend: ClassVar[str] = "ipc"

    packed: bool = False
    packed_buffer_size_bytes: int | None = None
    packed_num_buffers: int = 2
    memory: Literal["host", "device"] | None = field(default=None, kw_only=True)
    adopt: bool = field(default=False, kw_only=True)
    socket_directory: str | None = field(default=None, kw_only=True)
    wire: Literal["weightwire", "vllm"] = field(default="weightwire", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.packed_buffer_size_bytes
        if (size is not None and size < 1) or self.packed_num_buffers < 1:
            raise MessageError(
                f"packed_buffer_size_bytes and packed_num_buffers must be positive, got {size} and "
                f"{self.packed_num_buffers}"
            )
        if self.adopt and self.memory == "device":
            raise MessageError("adopt is for host memory: leave out memory='device'")

    def buffer_bytes(self, memory: Literal["host", "device"]) -> int:
        """Size of one ring buffer in that memory."""
        if self.packed_buffer_size_bytes is not None:
            return self.packed_buffer_size_bytes
        if self.wire == "vllm":
            return STOCK_BUFFER_BYTES
        return HOST_BUFFER_BYTES if memory == "host" else DEVICE_BUFFER_BYTES
