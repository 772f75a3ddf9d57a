"""What runs inside the rank processes of a check: workers, trainers, and looks at both, all at module level."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

from weightwire import staging
from weightwire.deadline import Deadline
from weightwire.errors import SourceMismatch
from weightwire.messages import ParallelConfig
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.testing.conformance.judging import judge, mixture
from weightwire.testing.conformance.payloads import Model, Payload
from weightwire.testing.conformance.source import Misdeed, Owners, PayloadSink, PayloadSource
from weightwire.testing.conformance.subject import TransportUnderTest
from weightwire.testing.pool import held_socket
from weightwire.testing.pool_rank import at_tidy
from weightwire.testing.worker_host import host
from weightwire.worker import Worker

State = dict[str, Any]

SECRET = "5a" * 16
_LATE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Opening:
    """How the trainer ranks of a check open their link.

    Attributes:
        subject: The transport.
        payload: What is sent.
        count: Number of trainer ranks.
        owners: See `PayloadSource`.
        scope: See `PayloadSource`.
        whole: See `PayloadSource`.
        fields: Further fields of the init info.
    """

    subject: TransportUnderTest
    payload: Payload
    count: int = 1
    owners: Owners | None = None
    scope: Any = "full"
    whole: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


class HearingWorker(Worker):
    """A worker that remembers what its trainer's calls raised."""

    heard: str = ""

    def update(self, update_info: dict[str, Any], **keywords: Any) -> None:
        """See `Worker.update`."""
        try:
            super().update(update_info, **keywords)
        except BaseException as error:
            self.heard = f"{type(error).__name__}: {error}"
            raise

    def finish(self, weight_version: str | None = None, **keywords: Any) -> None:
        """See `Worker.finish`."""
        try:
            super().finish(weight_version, **keywords)
        except BaseException as error:
            self.heard = f"{type(error).__name__}: {error}"
            raise


def host_payload(
    state: State, subject: TransportUnderTest, payload: Payload, version: int, index: int, count: int
) -> str:
    """Host a worker over a payload's model, the `index`-th of `count` of its server; returns its address."""
    subject.prepare()
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    staging.POISON = True
    at_tidy(_unpoisoned)
    state["model"] = model = Model(payload, version)
    parallel = ParallelConfig(rank=index, world_size=count, tensor_parallel_size=count)
    return host(state, HearingWorker(PayloadSink(model), parallel_config=parallel))


def _unpoisoned() -> None:
    staging.POISON = False


def hold_port(state: State) -> int:
    """A port that this rank holds until its trainer listens on it."""
    state["socket"] = held_socket()
    port: int = state["socket"].getsockname()[1]
    return port


def open_trainer(state: State, opening: Opening, client: Any, version: int, rank: int, port: int) -> None:
    """Make this rank's trainer engine."""
    source = PayloadSource(
        opening.payload,
        version,
        rank=rank,
        owners=opening.owners,
        scope=opening.scope,
        whole=opening.whole,
        place=opening.subject.place,
        placed=state.setdefault("placed", {}),
    )
    fields: dict[str, Any] = {"timeout": 60.0, **opening.fields}
    if opening.count > 1:
        fields |= {"rank": rank, "num_trainer_ranks": opening.count, "secret": SECRET, "master_port": port}
        fields["listen_socket"] = state.pop("socket", None)
    info = opening.subject.make_init_info(**fields)
    state["source"] = source
    state["trainer"] = trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    at_tidy(trainer.shutdown)


def send(
    state: State,
    version: int,
    *,
    label: str | None = None,
    timeout: float | None = None,
    misdeed: Misdeed = "",
) -> dict[str, Any]:
    """Send once; returns the report."""
    source, trainer = state["source"], state["trainer"]
    source.version, source.misdeed = version, misdeed
    report: dict[str, Any] = trainer.send_weights(weight_version=label, timeout=timeout).to_json()
    return report


def send_many(state: State, first: int, count: int) -> None:
    """Send `count` versions in a row."""
    for version in range(first, first + count):
        send(state, version)


def fail_many(state: State, first: int, count: int) -> None:
    """Have `count` rounds fail in the middle of the source."""
    for version in range(first, first + count):
        try:
            send(state, version, misdeed="missing")
        except SourceMismatch:
            continue
        raise AssertionError("a source that lacks its last tensor was sent")


def drive(state: State, client: Any) -> None:
    """Have the trainer drive `client` from its next link on."""
    state["trainer"].client = client


def close_trainer(state: State, times: int = 1) -> None:
    """Shut this rank's trainer down, `times` times."""
    for _ in range(times):
        state["trainer"].shutdown()


def close_worker(state: State, times: int = 1) -> None:
    """Have this rank's worker leave its trainer, `times` times."""
    for _ in range(times):
        state["worker"].shutdown(deadline=Deadline(5.0))


def judged(state: State, payload: Payload, version: int, previous: int) -> list[str]:
    """What is wrong with this rank's model after a round that returned; says so if it comes right a little later."""
    complaints = judge(state["model"], payload, version, previous)
    if not complaints:
        return []
    until = time.monotonic() + _LATE_SECONDS
    while time.monotonic() < until:
        if not judge(state["model"], payload, version, previous):
            return [f"{complaints[0]}, when send_weights returned; they came later"]
        time.sleep(0.02)
    return complaints


def mixed(state: State, payload: Payload, old: int, new: int) -> str:
    """What is wrong with this rank's model if it should still be in version `old`."""
    return mixture(state["model"], payload, old, new)


def heard(state: State) -> str:
    """What the trainer's last failed call raised in this rank's worker."""
    words: str = state["worker"].heard
    return words


def info(state: State) -> dict[str, Any]:
    """What this rank's worker says of itself."""
    answer: dict[str, Any] = state["worker"].info()
    return answer


def defers(state: State) -> bool:
    """Whether this rank's engine may return from `receive_weights` before the bytes are there."""
    engine = state["worker"]._connection.engine
    return bool(engine is not None and engine.defers_processing)
