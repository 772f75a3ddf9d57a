"""What travels on the control plane: dataclasses with strict types, unknown and missing keys named.

JSON gives no types, so every message checks its own: a `list[int]` that holds a string is refused here, by name,
instead of failing somewhere in a transport. Field names are wire facts and equal vLLM's where vLLM has them; what
weightwire adds travels under the one key `weightwire`, whose absence marks a stock peer.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from weightwire.errors import MessageError


def _matches(value: object, annotation: Any) -> bool:
    """Whether `value` is of the type `annotation` describes, for the few forms that messages use."""
    if annotation is Any:
        return True
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, one) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_matches(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _matches(key, arguments[0]) and _matches(item, arguments[1]) for key, item in value.items()
        )
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is None or annotation is type(None):
        return value is None
    return isinstance(value, annotation)


_known_annotations: dict[type, dict[str, Any]] = {}


def _annotations(cls: type) -> dict[str, Any]:
    if cls not in _known_annotations:
        _known_annotations[cls] = typing.get_type_hints(cls)
    return _known_annotations[cls]


def _spelled(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


@dataclass(kw_only=True)
class Message:
    """A dataclass that checks the types of its own fields.

    Raises:
        MessageError: A field of another type than declared.
    """

    def __post_init__(self) -> None:
        hints = _annotations(type(self))
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if not _matches(value, hints[spec.name]):
                raise MessageError(
                    f"{type(self).__name__}.{spec.name} must be {_spelled(hints[spec.name])}, "
                    f"got {type(value).__name__}"
                )

    @classmethod
    def parse(cls, record: Mapping[str, Any], *, what: str) -> Self:
        """Build the message from a mapping.

        Args:
            record: Keys and JSON values.
            what: How the caller names this record in an error, e.g. `"init_info for NCCLWeightTransferEngine"`.

        Raises:
            MessageError: "Invalid <what>: ..." naming unknown, missing or mistyped keys.
        """
        if not isinstance(record, Mapping):
            raise MessageError(f"Invalid {what}: expected an object, got {type(record).__name__}")
        known = {spec.name: spec for spec in dataclasses.fields(cls) if spec.init}
        unknown = sorted(str(key) for key in record if key not in known)
        missing = [
            name
            for name, spec in known.items()
            if name not in record
            and spec.default is dataclasses.MISSING
            and spec.default_factory is dataclasses.MISSING
        ]
        complaints = [f"unknown key {key!r}" for key in unknown] + [f"missing key {key!r}" for key in missing]
        if complaints:
            raise MessageError(f"Invalid {what}: {', '.join(complaints)}")
        try:
            return cls(**record)
        except MessageError as error:
            raise MessageError(f"Invalid {what}: {error.message}") from error
        except ValueError as error:
            raise MessageError(f"Invalid {what}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types; keys whose value is None are left out."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(kw_only=True)
class WeightTransferConfig(Message):
    """Which backend a worker uses.

    Attributes:
        backend: A backend name, or `"<distribution>:<backend>"`.
    """

    backend: str = "nccl"


@dataclass(kw_only=True)
class ParallelConfig(Message):
    """Where a worker rank stands in its deployment; the names are vLLM's.

    Attributes:
        rank: Rank inside one data-parallel replica, in [0, world_size).
        world_size: Tensor-parallel times pipeline-parallel size.
        data_parallel_index: Which replica.
    """

    rank: int = 0
    world_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_index: int = 0

    @property
    def world_size_across_dp(self) -> int:
        """Ranks in all replicas together."""
        return self.world_size * self.data_parallel_size

    @property
    def worker_index(self) -> int:
        """This rank's place among all ranks of its deployment."""
        return self.data_parallel_index * self.world_size + self.rank


@dataclass(kw_only=True)
class LinkInfo(Message):
    """What a weightwire trainer adds to a worker's init info, under the key `weightwire`.

    Attributes:
        api: Major and minor of the control protocol.
        wire: Version of the transport's data-plane format.
        backend: Backend that the trainer uses.
        trainer: Random id of the trainer; a restarted trainer has a new one.
        epoch: Counts the links this trainer has opened.
        secret: 16 bytes in hex that the first rendezvous frame must prove.
        address: Host of the rendezvous.
        port: Port of the rendezvous.
        senders: Trainer ranks that send tensor bytes, in data-plane order.
        trainers: Number of trainer ranks.
        workers: Number of worker ranks in all servers.
        worker_offset: How many worker ranks stand before this server's.
        metadata: Every parameter, as `ParamMeta.to_json`.
        takeover: Take the worker from another trainer that is still alive.
        checksum: Compare a CRC-32 of what was sent and what arrived before the vote.
        options: Settings of the transport that the worker has to share.
        timeout: Seconds that an update may take, for a host that passes no deadlines on; None leaves it to the host.
    """

    api: list[int]
    wire: int
    backend: str
    trainer: str
    epoch: int
    secret: str
    address: str
    port: int
    senders: list[int]
    trainers: int
    workers: int
    worker_offset: int = 0
    metadata: list[dict[str, Any]]
    takeover: bool = False
    checksum: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    timeout: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            secret = bytes.fromhex(self.secret)
        except ValueError:
            secret = b""
        if len(secret) != 16:
            raise MessageError("secret must be 16 bytes in hex")
        if not 0 < self.port < 65536:
            raise MessageError(f"port must be between 1 and 65535, got {self.port}")
        if self.trainers < 1 or self.workers < 1 or not 0 <= self.worker_offset < self.workers:
            raise MessageError(
                f"{self.trainers} trainers and {self.workers} workers with offset {self.worker_offset} "
                "do not describe a fleet"
            )


@dataclass(kw_only=True)
class WeightTransferInitInfo(Message):
    """Base of what a transport's worker engine is initialised with."""

    weightwire: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._link = None if self.weightwire is None else LinkInfo.parse(self.weightwire, what="weightwire")

    @property
    def link(self) -> LinkInfo | None:
        """The weightwire part, parsed; None from a stock trainer."""
        return self._link


@dataclass(kw_only=True)
class WeightTransferUpdateInfo(Message):
    """Base of one update message.

    Attributes:
        round: Number of the update within its link; None from a stock trainer.
        scope: `"full"` replaces every parameter, `"partial"` the ones named.
        revision: The revision that a commit of this update makes.
        base: The revision a partial update stands on.
        metadata: The parameters of this update where they are not those of init.
        trainer: Id of the trainer that sends it.
        label: What the weights will be called once it commits, for a host that is not told at finish.
        pause: How the host keeps readers out while it commits, where it said in hello that it does so by itself.
        timeout: Seconds that the rest of the update may take, for a host that passes no deadlines on.
    """

    round: int | None = None
    trainer: str | None = None
    scope: typing.Literal["full", "partial"] = "full"
    revision: dict[str, Any] | None = None
    base: dict[str, Any] | None = None
    metadata: list[dict[str, Any]] | None = None
    label: str | None = None
    pause: typing.Literal["keep", "wait", "abort"] | None = None
    timeout: float | None = None


WeightTransferUpdatePayload = dict[str, Any] | list[dict[str, Any]]
"""An `update_info`: one for all workers, or a list with one element per worker rank of that server."""


@dataclass(kw_only=True)
class WeightTransferInitRequest(Message):
    """A request to initialise; what a Ray or local host receives."""

    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class WeightTransferUpdateRequest(Message):
    """A request to update; what a Ray or local host receives."""

    update_info: dict[str, Any] | list[Any] = field(default_factory=dict)


@dataclass
class TrainerInitInfo(Message):
    """Base of what a trainer engine is initialised with. A subclass sets `backend`.

    Attributes:
        master_address: Address that trainer rank 0 listens on and every other rank connects to.
        master_port: Its port; 0 lets the system choose, which needs a single trainer rank.
        world_size: Data-plane senders plus workers; None asks the client.
        rank: This trainer rank; rank 0 drives the control plane.
        num_trainer_ranks: How many trainer ranks call; None means the size of the default process group if there
            is one, else 1.
        secret: 16 bytes in hex, the same on every trainer rank; None takes `WEIGHTWIRE_SECRET`, and a single rank
            makes its own.
        timeout: Default deadline of `trainer_init` and `send_weights`, in seconds.
        peer_timeout: Silence after which a rank counts as stopped, in seconds.
        takeover: Take the workers from another trainer that is still alive.
        checksum: Compare a CRC-32 of what was sent and what arrived before the vote.
        draft: Update the workers' speculative draft model, whose parameters the source then has, instead of the model.
        listen_socket: Rank 0 only: a socket bound by the caller, instead of address and port.

    Raises:
        TypeError: A subclass that declares no `backend`.
    """

    backend: ClassVar[str]

    master_address: str = field(default="127.0.0.1", kw_only=True)
    master_port: int = field(default=0, kw_only=True)
    world_size: int | None = field(default=None, kw_only=True)
    rank: int = field(default=0, kw_only=True)
    num_trainer_ranks: int | None = field(default=None, kw_only=True)
    secret: str | None = field(default=None, kw_only=True, repr=False)
    timeout: float = field(default=300.0, kw_only=True)
    peer_timeout: float = field(default=10.0, kw_only=True)
    takeover: bool = field(default=False, kw_only=True)
    checksum: bool = field(default=False, kw_only=True)
    draft: bool = field(default=False, kw_only=True)
    listen_socket: Any = field(default=None, kw_only=True, repr=False, compare=False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not isinstance(getattr(cls, "backend", None), str):
            raise TypeError(f"{cls.__name__} must set the class variable backend to its backend name")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 0:
            raise MessageError(f"rank must not be negative, got {self.rank}")
        if self.num_trainer_ranks is not None and self.rank >= self.num_trainer_ranks:
            raise MessageError(f"rank {self.rank} is outside {self.num_trainer_ranks} trainer ranks")
        if not 0 <= self.master_port < 65536:
            raise MessageError(f"master_port must be between 0 and 65535, got {self.master_port}")
        if self.timeout <= 0 or self.peer_timeout <= 0:
            raise MessageError("timeout and peer_timeout must be positive")
        if self.world_size is not None and self.world_size < 2:
            raise MessageError(f"world_size counts senders and workers and is at least 2, got {self.world_size}")


def pick_update(update_info: WeightTransferUpdatePayload, *, index: int, count: int) -> dict[str, Any]:
    """The element of `update_info` that is for the worker at `index` of `count`.

    Raises:
        MessageError: A list of another length than `count`, or an element that is no object.
    """
    if isinstance(update_info, Sequence) and not isinstance(update_info, str):
        if len(update_info) != count:
            raise MessageError(
                f"update_info lists {len(update_info)} elements for {count} workers: give one per worker rank"
            )
        update_info = update_info[index]
    if not isinstance(update_info, dict):
        raise MessageError(f"update_info must be an object, got {type(update_info).__name__}")
    return update_info
