"""What a transfer did: bytes, seconds and speed by phase and rank, and progress while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvent:
    """One step of a running transfer.

    Attributes:
        phase: `"begin"`, `"transfer"`, `"finish"` or `"done"`.
        parameter: The parameter at hand, if there is one.
        parameters_done: How many parameters have been handed to the transport.
        parameters: How many there are.
        bytes_done: Bytes handed to the transport by this rank.
        bytes: Bytes this rank sends in all.
    """

    phase: str
    parameter: str | None = None
    parameters_done: int = 0
    parameters: int = 0
    bytes_done: int = 0
    bytes: int = 0


ProgressCallback = Callable[[ProgressEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank did in a round.

    Attributes:
        rank: The rank in words.
        bytes: Tensor bytes it sent or received.
        seconds: Seconds by phase.
        details: What else it has to say, e.g. how its commit was made.
    """

    rank: str
    bytes: int
    seconds: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOutcome:
    """How one of several servers came out of a round.

    Attributes:
        server: The server in words, e.g. its URL.
        workers: Its worker ranks in the round; none if it was left out.
        error: Why it was left out, in its own words where it had any; None if it committed.
    """

    server: str
    workers: tuple[int, ...] = ()
    error: str | None = None

    @property
    def committed(self) -> bool:
        """Whether it is on the new weights."""
        return self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """The outcome of one `send_weights`.

    Attributes:
        transport: Backend name.
        path: The way the bytes really took, e.g. `"gloo send/recv, 2 workers"`.
        round: Number of the round within its link.
        scope: `"full"` or `"partial"`.
        parameters: How many parameters were sent.
        bytes: Their size in bytes, once.
        seconds: Seconds by phase on the sending rank.
        label: The `weight_version` given, if one was.
        revision: The revision that the workers are on now.
        previous: The revision that they were on before, where known.
        ranks: What each rank did.
        reinitialised: Whether the link had to be opened again first.
        verified: Whether what the workers hold was proved equal (metadata always is; bytes with `checksum`).
        servers: How each server came out of it, where the client drives several.
    """

    transport: str
    path: str
    round: int
    scope: str
    parameters: int
    bytes: int
    seconds: dict[str, float]
    label: str | None
    revision: dict[str, Any]
    previous: dict[str, Any] | None
    ranks: tuple[RankReport, ...]
    reinitialised: bool = False
    verified: bool = False
    servers: tuple[ServerOutcome, ...] = ()

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole round."""
        return sum(self.seconds.values())

    @property
    def gib_per_second(self) -> float:
        """Payload over the whole round, in GiB/s."""
        return self.bytes / GIB / self.total_seconds if self.total_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types."""
        record = dataclasses.asdict(self)
        record["gib_per_second"] = self.gib_per_second
        return record
