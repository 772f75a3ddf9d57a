"""What sparse_nccl trainers and workers are initialised with, and what one update says. Field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from weightwire.errors import MessageError, MetadataError
from weightwire.layout import ParamMeta, dtype_from_name
from weightwire.messages import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo

PIECE_BYTES: Final = 16 << 20
PIECES: Final = 8
_LISTS: Final = ("dtype_names", "shapes", "num_updates_list")


@dataclass(kw_only=True)
class SparseNCCLWeightTransferInitInfo(WeightTransferInitInfo):
    """What a worker engine is initialised with.

    Attributes:
        master_address: Address of the trainer's rendezvous.
        master_port: Its port.
        rank_offset: Data-plane rank of the first worker of this server.
        world_size: Data-plane ranks: senders, then workers.
        packed_buffer_size_bytes: Size of one ring buffer of a dense round, and of the pieces of large messages.
        packed_num_buffers: Number of ring buffers.

    Raises:
        MessageError: Numbers that do not fit.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed_buffer_size_bytes: int = PIECE_BYTES
    packed_num_buffers: int = PIECES

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rank_offset < self.world_size:
            raise MessageError(f"rank_offset {self.rank_offset} must lie in [1, world_size {self.world_size})")
        _check_positive(self, "packed_buffer_size_bytes", "packed_num_buffers")


@dataclass(kw_only=True)
class SparseNCCLWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """One update message: either what changed since the base, or a caller's patches, which it then lists.

    Attributes:
        names: Of a caller's patches: the parameters, in checkpoint names; None for what the trainer found itself.
        dtype_names: Their dtypes, e.g. `"bfloat16"`.
        shapes: Their full shapes.
        num_updates_list: How many elements of each change.
        chunk: Number of the patch message within its link.
        verify: Whether the digests of what would result are compared before the vote.

    Raises:
        MessageError: Only some of the lists, lists of different lengths, none, or a negative number of updates.
    """

    names: list[str] | None = None
    dtype_names: list[str] | None = None
    shapes: list[list[int]] | None = None
    num_updates_list: list[int] | None = None
    chunk: int = 0
    verify: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.names is None:
            given = [key for key in _LISTS if getattr(self, key) is not None]
            if given:
                raise MessageError(f"{given[0]} without names: patches have names, {', '.join(_LISTS)}")
            return
        for key in _LISTS:
            found = getattr(self, key)
            if found is None or len(found) != len(self.names):
                many = "no" if found is None else len(found)
                raise MessageError(f"{key} has {many} elements for {len(self.names)} names")
        if not self.num_updates_list:
            raise MessageError("num_updates_list is empty: an update without patches is not sent")
        if min(self.num_updates_list) < 0:
            raise MessageError(f"num_updates_list must not be negative, got {min(self.num_updates_list)}")

    @property
    def patched(self) -> tuple[ParamMeta, ...] | None:
        """The parameters of a caller's patches; None where there are none.

        Raises:
            MessageError: A dtype or shape that cannot be.
        """
        if self.names is None:
            return None
        assert self.dtype_names is not None and self.shapes is not None
        rows = zip(self.names, self.dtype_names, self.shapes, strict=True)
        try:
            return tuple(ParamMeta(name, dtype_from_name(dtype), tuple(shape)) for name, dtype, shape in rows)
        except MetadataError as error:
            raise MessageError(error.message, parameter=error.parameter) from error


@dataclass
class SparseNCCLTrainerInitInfo(TrainerInitInfo):
    """What a trainer engine is initialised with.

    Attributes:
        master_address: Address that trainer rank 0 listens on and every other rank connects to.
        master_port: Its port; 0 lets the system choose, which needs a single trainer rank.
        world_size: Senders plus workers; None asks the client.
        snapshot: `"copy"` holds what the workers have in host memory, as large as this rank's shards; `"hash"` holds a
            digest for each block instead and sends changed blocks whole.
        kernels: `"numba"` needs `weightwire-sparse[fast]`; `"auto"` takes it where it is installed.
        threads: Threads that find and code changes.
        compression: `"zstd"` (`weightwire-sparse[zstd]`) compresses values where that saves anything.
        dense_above: A round of more than this share of the dense bytes goes dense instead; more than 1 never does.
        verify_every: Every so many rounds the digests of what results are compared before the workers commit; 0 never
            does, `checksum=True` always.
        history_bytes: Memory for what changed in this round and in earlier ones, for workers that missed some; None: as
            much as this rank's shards.
        packed_buffer_size_bytes: Size of one ring buffer of a dense round, and of the pieces of large messages.
        packed_num_buffers: Number of ring buffers, and of pieces in flight to one worker.
        stall_limit: Seconds without any progress after which a peer counts as stopped.

    Raises:
        MessageError: Numbers that do not fit.
    """

    backend: ClassVar[str] = "sparse_nccl"

    master_address: str = "127.0.0.1"
    master_port: int = 0
    world_size: int | None = None
    snapshot: Literal["copy", "hash"] = field(default="copy", kw_only=True)
    kernels: Literal["auto", "numpy", "numba"] = field(default="auto", kw_only=True)
    threads: int = field(default=2, kw_only=True)
    compression: Literal["none", "zstd"] = field(default="none", kw_only=True)
    dense_above: float = field(default=0.6, kw_only=True)
    verify_every: int = field(default=64, kw_only=True)
    history_bytes: int | None = field(default=None, kw_only=True)
    packed_buffer_size_bytes: int = field(default=PIECE_BYTES, kw_only=True)
    packed_num_buffers: int = field(default=PIECES, kw_only=True)
    stall_limit: float = field(default=5.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "threads", "packed_buffer_size_bytes", "packed_num_buffers", "stall_limit")
        for name in ("dense_above", "verify_every", "history_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise MessageError(f"{name} must not be negative, got {getattr(self, name)}")


def _check_positive(values: Any, *names: str) -> None:
    for name in names:
        if getattr(values, name) <= 0:
            raise MessageError(f"{name} must be positive, got {getattr(values, name)}")
