"""What nccl_m2n trainers and workers are initialised with, and what one update says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from weightwire.errors import MessageError
from weightwire.messages import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo

BUFFER_BYTES: Final = 8 << 20
BUFFERS: Final = 4
DIRECT_BYTES: Final = 1 << 20
_SMALLEST_MESSAGE: Final = 64


def check_sizes(values: Any) -> None:
    """Refuse sizes that are not positive, of an init info of either side.

    Raises:
        MessageError: One is not, or a buffer holds no element of every dtype.
    """
    if values.buffer_bytes < _SMALLEST_MESSAGE:
        raise MessageError(f"buffer_bytes must be at least {_SMALLEST_MESSAGE}, got {values.buffer_bytes}")
    for name in ("num_buffers", "direct_bytes"):
        if getattr(values, name) < 1:
            raise MessageError(f"{name} must be positive, got {getattr(values, name)}")


@dataclass(kw_only=True)
class M2NWeightTransferInitInfo(WeightTransferInitInfo):
    """What a worker engine is initialised with.

    Attributes:
        master_address: Address of the trainer's rendezvous.
        master_port: Its port.
        rank_offset: Data-plane rank of the first worker of this server.
        world_size: Data-plane ranks: senders, then workers.
        buffer_bytes: See `M2NTrainerInitInfo`.
        num_buffers: See `M2NTrainerInitInfo`.
        direct_bytes: See `M2NTrainerInitInfo`.

    Raises:
        MessageError: Numbers that do not fit.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    buffer_bytes: int = BUFFER_BYTES
    num_buffers: int = BUFFERS
    direct_bytes: int = DIRECT_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rank_offset < self.world_size:
            raise MessageError(f"rank_offset {self.rank_offset} must lie in [1, world_size {self.world_size})")
        check_sizes(self)


@dataclass(kw_only=True)
class M2NWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """One update message: it brings what was declared at init."""


@dataclass
class M2NTrainerInitInfo(TrainerInitInfo):
    """What a trainer engine is initialised with.

    Attributes:
        master_address: Address that trainer rank 0 listens on and every other rank connects to.
        master_port: Its port; 0 lets the system choose, which needs a single trainer rank.
        world_size: Senders plus workers; None asks the client. Every rank that owns anything is a sender.
        buffer_bytes: Size of one buffer of the ring in which small pieces travel together. Between many ranks messages
            are smaller, so that what is open for all of a rank's peers stays within two rings.
        num_buffers: Number of buffers; also how many pieces of that size are in flight between one pair of ranks.
        direct_bytes: From this size on a piece goes from its own storage, and into it, where it is contiguous there;
            smaller ones are packed.
        foreign: Names that no worker takes and that are not refused for it.
        layouts: Directory in which rank 0 leaves `source.json` and `workers.json` for `weightwire plan`, on every link.
        stall_limit: Seconds in which nothing moves between two ranks, after which whoever waits takes the other one
            for stopped. None leaves it to the rendezvous, which misses a process that stops after `peer_timeout`: a
            rank may have much to do with others before it is this one's turn.

    Raises:
        MessageError: Numbers that do not fit.
    """

    backend: ClassVar[str] = "nccl_m2n"

    master_address: str = "127.0.0.1"
    master_port: int = 0
    world_size: int | None = None
    buffer_bytes: int = field(default=BUFFER_BYTES, kw_only=True)
    num_buffers: int = field(default=BUFFERS, kw_only=True)
    direct_bytes: int = field(default=DIRECT_BYTES, kw_only=True)
    foreign: list[str] = field(default_factory=list, kw_only=True)
    layouts: str | None = field(default=None, kw_only=True)
    stall_limit: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self)
        if self.stall_limit is not None and self.stall_limit <= 0:
            raise MessageError(f"stall_limit must be positive, got {self.stall_limit}")


def message_bytes(buffer_bytes: int, num_buffers: int, workers: int) -> int:
    """Bytes of one message of small pieces at most: what is open at a time, one for each worker, fits two rings."""
    return max(_SMALLEST_MESSAGE, min(buffer_bytes, 2 * num_buffers * buffer_bytes // workers))
