"""What sharded_rdt trainers and workers are initialised with, and what one update says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from weightwire.errors import MessageError
from weightwire.messages import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo

TensorTransport = Literal["auto", "nixl", "ray_nixl", "gloo", "object_store"]
BUFFER_BYTES: Final = 8 << 20
DIRECT_BYTES: Final = 1 << 20
_SMALLEST_BUFFER: Final = 64


def _check(values: Any) -> None:
    if values.buffer_bytes < _SMALLEST_BUFFER:
        raise MessageError(f"buffer_bytes must be at least {_SMALLEST_BUFFER}, got {values.buffer_bytes}")
    for name in ("num_rdt_buffers", "direct_bytes", "stall_timeout_s"):
        if getattr(values, name) <= 0:
            raise MessageError(f"{name} must be positive, got {getattr(values, name)}")


@dataclass(kw_only=True)
class ShardedRDTWeightTransferInitInfo(WeightTransferInitInfo):
    """What a worker engine is initialised with.

    Attributes:
        trainer_actor_namespace: Ray namespace of the trainer ranks' producers, whose names the link tells.
        tensor_transport: See `ShardedRDTTrainerInitInfo`.
        num_rdt_buffers: See there.
        buffer_bytes: See there.
        direct_bytes: See there.
        stall_timeout_s: See there.

    Raises:
        MessageError: Numbers that do not fit.
    """

    trainer_actor_namespace: str | None = None
    tensor_transport: TensorTransport = "auto"
    num_rdt_buffers: int = 2
    buffer_bytes: int = BUFFER_BYTES
    direct_bytes: int = DIRECT_BYTES
    stall_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)


@dataclass(kw_only=True)
class ShardedRDTWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """One update message: it brings what was declared at init."""


@dataclass
class ShardedRDTTrainerInitInfo(TrainerInitInfo):
    """What a trainer engine is initialised with.

    Attributes:
        num_consumers: How many workers pull; None asks the client.
        trainer_actor_namespace: Ray namespace in which the producers are named; None takes this process's own.
        num_rdt_buffers: Reads that a worker has on their way at a time, of one or more chunks each; and as many
            buffers, of `buffer_bytes`, on either side.
        gather_lookahead: How many layers beyond the one that is being pulled a rank may hold ready, where its source
            makes tensors as they are asked for.
        stall_timeout_s: Seconds in which nothing moves, after which whoever waits says whom it waited for.
        tensor_transport: How bytes travel: `"nixl"`, which reads from the trainer rank's own memory; Ray's own
            transports `"ray_nixl"` and `"gloo"`; `"object_store"`; `"auto"` takes the first of these that is there on
            all ranks and moves bytes between them.
        buffer_bytes: Size of a buffer in which small pieces travel together.
        direct_bytes: From this size on a piece that is contiguous is read from its own storage, and into it.
        foreign: Names that no worker takes and that are not refused for it.

    Raises:
        MessageError: Numbers that do not fit.
    """

    backend: ClassVar[str] = "sharded_rdt"

    num_consumers: int | None = None
    trainer_actor_namespace: str | None = None
    num_rdt_buffers: int = 2
    gather_lookahead: int = 1
    stall_timeout_s: float = 300.0
    tensor_transport: TensorTransport = field(default="auto", kw_only=True)
    buffer_bytes: int = field(default=BUFFER_BYTES, kw_only=True)
    direct_bytes: int = field(default=DIRECT_BYTES, kw_only=True)
    foreign: list[str] = field(default_factory=list, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)
        if self.gather_lookahead < 0:
            raise MessageError(f"gather_lookahead must not be negative, got {self.gather_lookahead}")
        if self.num_consumers is not None and self.num_consumers < 1:
            raise MessageError(f"num_consumers must be positive, got {self.num_consumers}")
