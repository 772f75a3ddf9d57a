"""Sources, workers and sharded trainers for the tests of any transport; functions for `Rank.call`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from core.tests.sink_models import content
from weightwire import staging
from weightwire.layout import ParamMeta
from weightwire.messages import ParallelConfig
from weightwire.registry import WeightTransferTrainerFactory, engine_class
from weightwire.source import WeightSource
from weightwire.staging import sha256
from weightwire.testing.conformance.ranks import HearingWorker
from weightwire.testing.pool import PendingCall, held_socket
from weightwire.testing.pool_process import Rank
from weightwire.testing.pool_rank import at_tidy
from weightwire.testing.worker_host import WorkerHost
from weightwire.testing.workers import RankClient

State = dict[str, Any]
Pairs = Iterable[tuple[str, Tensor]]
Build = Callable[..., nn.Module]
SECRET = "5a" * 16


def full(meta: ParamMeta, seed: int) -> Tensor:
    """What a parameter holds in a known state: random bits."""
    return content(meta.name, torch.empty(meta.shape, dtype=meta.dtype, device="meta"), seed)


def whole(metadata: Sequence[ParamMeta], seed: int) -> dict[str, Tensor]:
    """What all of them hold."""
    return {meta.name: full(meta, seed) for meta in metadata}


class BoxSource(WeightSource):
    """One rank's boxes of tensors that are made while they are asked for, of whatever strides slicing gives.

    Attributes:
        seed: Of what they hold; set it between rounds.
    """

    def __init__(self, metadata: Sequence[ParamMeta], rank: int, *, scope: str = "full") -> None:
        self._metadata, self._rank = list(metadata), rank
        self.scope = scope
        self.seed = 1

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return self._metadata

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for meta in self._metadata:
            if meta.owned_by(self._rank):
                slices = tuple(slice(start, start + size) for start, size in self._extents(meta))
                yield meta.name, full(meta, self.seed)[slices]

    def _extents(self, meta: ParamMeta) -> Iterator[tuple[int, int]]:
        return zip(meta.box(self._rank).start, meta.local_shape(self._rank), strict=True)


def boxes(state: State, rank: int, count: int, metadata: Sequence[ParamMeta], scope: str = "full") -> WeightSource:
    """A trainer rank's source."""
    return BoxSource(metadata, rank, scope=scope)


# The workers


def host(state: State, build: Build, arguments: tuple[Any, ...], index: int, count: int, options: Any) -> str:
    """Host a worker in this rank, the `index`-th of `count` of its server; an earlier one is closed."""
    close_host(state)
    staging.POISON = True
    state["model"] = model = build(state, index, count, *arguments)
    parallel = ParallelConfig(rank=index, world_size=count, tensor_parallel_size=count)
    state["worker"] = worker = HearingWorker(model, parallel_config=parallel, **options)
    state["host"] = server = WorkerHost(worker)
    at_tidy(lambda: close_host(state))
    return server.address


def close_host(state: State) -> None:
    """Close the worker of this rank."""
    staging.POISON = False
    if (server := state.pop("host", None)) is not None:
        server.close()


def serve(ranks: Sequence[Rank], build: Build, *arguments: Any, **options: Any) -> RankClient:
    """Host one server over `ranks`; `build(state, index, count, *arguments)` makes the model of one."""
    calls = [rank.start(host, build, arguments, index, len(ranks), options) for index, rank in enumerate(ranks)]
    addresses = [call.result() for call in calls]
    return RankClient(addresses, [f"worker rank {rank.index} (pid {rank.pid})" for rank in ranks])


def held(state: State) -> dict[str, str]:
    """Digests of what this rank's model holds."""
    return digests(state["model"])


def digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of every parameter and buffer."""
    return {name: sha256(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def info(state: State) -> dict[str, Any]:
    """What this rank's worker says of itself."""
    answer: dict[str, Any] = state["worker"].info()
    return answer


def heard(state: State) -> str:
    """What the last call of the trainer that failed raised in this rank's worker."""
    words: str = state["worker"].heard
    return words


def change(state: State, function: Callable[[Any], object]) -> None:
    """Do something to this rank's model."""
    function(state["model"])


class Named(nn.Module):
    """Takes the tensors of some names, whole."""

    def __init__(self, metadata: Sequence[ParamMeta], names: Sequence[str]) -> None:
        super().__init__()
        for meta in metadata:
            if meta.name in names:
                self.register_parameter(meta.name, nn.Parameter(torch.zeros(meta.shape, dtype=meta.dtype), False))

    def load_weights(self, pairs: Pairs) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in pairs:
            if name in parameters:
                parameters[name].data.copy_(tensor)


def named(state: State, index: int, count: int, metadata: Sequence[ParamMeta], takes: Sequence[Sequence[str]]) -> Named:
    """A worker's model that takes the names `takes[index]`."""
    return Named(metadata, takes[index])


def loaded(metadata: Sequence[ParamMeta], names: Sequence[str], seed: int) -> dict[str, str]:
    """Digests of what such a model holds after plain loading."""
    model = Named(metadata, names)
    model.load_weights(whole(metadata, seed).items())
    return digests(model)


# The trainers


def hold_port(state: State) -> int:
    """A port that this rank holds until its trainer listens on it."""
    state["held"] = sock = held_socket()
    port: int = sock.getsockname()[1]
    return port


def open_trainer(
    state: State,
    backend: str,
    client: Any,
    make: Callable[..., WeightSource],
    arguments: Any,
    rank: int,
    count: int,
    options: Any,
) -> None:
    """Make the trainer engine of this rank; an earlier one is closed."""
    close(state)
    given = {"timeout": 60.0, **options}
    given |= {"rank": rank, "num_trainer_ranks": count, "secret": SECRET, "listen_socket": state.pop("held", None)}
    state["source"] = source = make(state, rank, count, *arguments)
    info = engine_class("trainer", backend).init_info_cls(**given)
    state["trainer"] = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def send(state: State, seed: int | None = None, label: str | None = None, timeout: float | None = None) -> Any:
    """Send once, what the source holds in state `seed`; returns the report."""
    if seed is not None:
        state["source"].seed = seed
    return state["trainer"].send_weights(weight_version=label, timeout=timeout).to_json()


def plans_made(state: State) -> int:
    """How often this rank has planned."""
    made: int = state["trainer"].plans_made
    return made


def drive(state: State, client: Any) -> None:
    """Have the trainer drive `client` from the next link on."""
    state["trainer"].client = client


def close(state: State) -> None:
    """Shut the trainer down, if there is one."""
    if (trainer := state.pop("trainer", None)) is not None:
        trainer.shutdown()


class Trainers:
    """The trainer ranks of a test, linked.

    Args:
        ranks: Their processes.
        client: The workers.
        make: Makes the source of each: `make(state, rank, count, *arguments)`.
        arguments: See `make`.
        options: Fields of the init info.
    """

    backend: ClassVar[str]
    """The transport."""

    def __init__(
        self, ranks: Sequence[Rank], client: Any, make: Callable[..., WeightSource], *arguments: Any, **options: Any
    ) -> None:
        self.ranks = list(ranks)
        options["master_port"] = self.ranks[0].call(hold_port)
        self.opening = [
            rank.start(open_trainer, self.backend, client, make, arguments, place, len(ranks), options)
            for place, rank in enumerate(self.ranks)
        ]
        self._opened = False

    def opened(self) -> Self:
        """Wait until all are linked."""
        for call in self.opening:
            call.result()
        return self

    def errors(self) -> list[BaseException | None]:
        """What `trainer_init` raised on each."""
        return [call.exception() for call in self.opening]

    def start(self, *arguments: Any, **options: Any) -> list[PendingCall[Any]]:
        return [rank.start(send, *arguments, **options) for rank in self.ranks]

    def send(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Rank 0's report of one round."""
        reports = [call.result() for call in self.start(*arguments, **options)]
        assert all(report["revision"] == reports[0]["revision"] for report in reports)
        first: dict[str, Any] = reports[0]
        return first

    def send_in_vain(self, *arguments: Any, **options: Any) -> list[BaseException]:
        """What a round that fails raises on each rank."""
        found = [call.exception() for call in self.start(*arguments, **options)]
        assert all(found), found
        return [error for error in found if error is not None]

    def each(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [call.result() for call in [rank.start(function, *arguments) for rank in self.ranks]]

    def close(self) -> None:
        self.each(close)


def sent_by(report: dict[str, Any], side: str) -> list[int]:
    """The bytes that each rank of one side sent or received, by its rank."""
    return [one["bytes"] for one in report["ranks"] if one["rank"].startswith(side)]


def details_of(report: dict[str, Any], worker: int) -> dict[str, Any]:
    """What a worker rank said of its part in a round."""
    (found,) = [one["details"] for one in report["ranks"] if one["rank"] == f"worker rank {worker}"]
    details: dict[str, Any] = found
    return details
