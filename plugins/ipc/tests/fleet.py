"""Models, trainers and workers for the tests of this transport; module-level, so that ranks can run them."""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from weightwire.clients.fanout import FanoutClient
from weightwire.layout import ParamMeta
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource, WeightSource
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool import held_socket
from weightwire.testing.pool_process import Rank
from weightwire.testing.workers import host_workers
from weightwire_ipc import IPCTrainerInitInfo, share

State = dict[str, Any]
MODES = ("ring", "shared", "adopt")
SECRET = "5a" * 16


def filled(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> nn.Parameter:
    """A parameter of random numbers; of random small bits where a dtype has few."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        data = torch.randn(shape, generator=generator).to(dtype)
    else:
        bits = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), generator=generator)
        data = bits.to(torch.uint8).view(dtype).reshape(shape)
    return nn.Parameter(data, requires_grad=False)


class Zoo(nn.Module):
    """Parameters of many dtypes and shapes: small ones that are packed, large ones that are not, odd ones."""

    def __init__(self, seed: int, *, width: int = 600) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "norm": ((7,), torch.bfloat16),
            "scale": ((3,), torch.float8_e4m3fn),
            "wide": ((width, width), torch.float32),
            "scalar": ((), torch.float32),
            "counts": ((5,), torch.int64),
            "mask": ((3,), torch.bool),
            "unsigned": ((9,), torch.uint16),
            "sixteen": ((width, 3), torch.float16),
            "sixtyfour": ((2, 2), torch.float64),
            "complex": ((4,), torch.complex64),
            "last": ((width, width), torch.bfloat16),
        }
        for name, (shape, dtype) in kinds.items():
            self.register_parameter(name, filled(shape, dtype, generator))


class Loading(Zoo):
    """A model that loads weights itself."""

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        mine = dict(self.named_parameters())
        for name, tensor in pairs:
            with torch.no_grad():
                mine[name].copy_(tensor)


def zoo(state: State, seed: int = 0, width: int = 600) -> nn.Module:
    """A worker's or a trainer's model."""
    state["model"] = model = Zoo(seed, width=width)
    return model


def loading(state: State, seed: int = 0, width: int = 600) -> nn.Module:
    """A worker's model that loads weights itself."""
    state["model"] = model = Loading(seed, width=width)
    return model


def blocks(state: State, value: float = 0.0, count: int = 8, nbytes: int = 1 << 20) -> nn.Module:
    """A model of `count` parameters of `nbytes` each."""
    state["model"] = model = nn.Module()
    for place in range(count):
        model.register_parameter(f"block_{place}", nn.Parameter(torch.full((nbytes // 4,), value + place)))
    return model


def digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of every parameter's bytes."""
    return {
        name: hashlib.sha256(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


class OwnedSource(WeightSource):
    """A model whose parameters are owned by trainer ranks in turn, as pipeline stages or experts are."""

    def __init__(self, model: nn.Module, rank: int, ranks: int) -> None:
        self._model, self._rank, self._ranks = model, rank, ranks

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, parameter.dtype, tuple(parameter.shape), owners=(place % self._ranks,))
            for place, (name, parameter) in enumerate(self._model.named_parameters())
        ]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        for meta, (name, parameter) in zip(self.metadata, self._model.named_parameters(), strict=True):
            if meta.owned_by(self._rank):
                yield name, parameter

    def resident(self) -> tuple[list[str], list[Tensor]] | None:
        names, tensors = zip(*self.iter_full(), strict=True)
        return list(names), list(tensors)


def options(mode: str) -> dict[str, Any]:
    """What a trainer of this mode is told, with a small ring."""
    return {"packed_buffer_size_bytes": 1 << 18, "packed_num_buffers": 2, "adopt": mode == "adopt"}


def open_trainer(
    state: State,
    client: Any,
    *,
    mode: str = "ring",
    model: Callable[..., nn.Module] = zoo,
    arguments: tuple[Any, ...] = (1,),
    rank: int = 0,
    count: int = 1,
    owned: bool = False,
    port: int = 0,
    **info: Any,
) -> None:
    """Make a trainer engine in this rank."""
    trained = model(state, *arguments)
    if mode == "shared":
        share(trained)
    source = OwnedSource(trained, rank, count) if owned else ModuleSource(trained)
    info = {"timeout": 60.0, **options(mode), **info}
    if count > 1:
        info |= {"rank": rank, "num_trainer_ranks": count, "secret": SECRET, "master_port": port}
        info["listen_socket"] = state.get("held")
    made = WeightTransferTrainerFactory.trainer_init(IPCTrainerInitInfo(**info), client=client, source=source)
    state["trainer"] = made


def step(state: State) -> None:
    """Change every parameter that counts."""
    with torch.no_grad():
        for parameter in state["model"].parameters():
            if parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1:
                parameter.add_(1)


def send(state: State, label: str | None = None, *, timeout: float | None = None, stepping: bool = True) -> State:
    """Send once, after a change of every parameter; returns the report and the trainer's digests."""
    if stepping:
        step(state)
    report = state["trainer"].send_weights(weight_version=label, timeout=timeout)
    return {"report": report.to_json(), "digests": digests(state["model"])}


def send_often(state: State, count: int) -> None:
    """Send so many times."""
    for _ in range(count):
        send(state)


def drive(state: State, client: Any) -> None:
    """Have the trainer drive `client` from now on."""
    state["trainer"].client = client


def hold_port(state: State) -> int:
    """A port that this rank holds until its trainer listens on it."""
    state["held"] = held = held_socket()
    port: int = held.getsockname()[1]
    return port


def close(state: State) -> None:
    """Shut the trainer down, and let go of its model."""
    state.pop("trainer").shutdown()
    del state["model"]
    gc.collect()


def leave(state: State) -> None:
    """Have the worker leave its trainer."""
    state["worker"].shutdown()


def model_digests(state: State) -> dict[str, str]:
    """Digests of this rank's model."""
    return digests(state["model"])


def info(state: State) -> dict[str, Any]:
    """What this rank's worker says of itself."""
    answer: dict[str, Any] = state["worker"].info()
    return answer


def holdings(state: State) -> Counter[str]:
    """Descriptors by kind, mapped memory files and threads of this process."""
    gc.collect()
    found: Counter[str] = Counter(threads=len(os.listdir("/proc/self/task")))
    for number in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{number}").partition(":[")[0]] += 1
        except OSError:
            continue  # the descriptor of the listing itself
    with open("/proc/self/maps") as file:
        found["mapped"] = sum("/memfd:weightwire" in line for line in file)
    return found


def settled(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until `condition` holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not settle in time"
        time.sleep(0.01)


class Scene:
    """A trainer and workers, each a server of its own, linked, with no round behind them.

    Args:
        ranks: Lends processes.
        mode: One of `MODES`.
        workers: How many.
        model: What all of them have.
        arguments: Of the workers' models.
        theirs: Keywords of `Worker`.
        trained: Arguments of the trainer's model.
        mine: Of `open_trainer`.
    """

    def __init__(
        self,
        ranks: BorrowRanks,
        mode: str,
        *,
        workers: int = 2,
        model: Callable[..., nn.Module] = blocks,
        arguments: tuple[Any, ...] = (),
        theirs: dict[str, Any] | None = None,
        trained: tuple[Any, ...] = (7.0,),
        **mine: Any,
    ) -> None:
        self.mode, self.model = mode, model
        self.trainer, *self.workers = ranks(1 + workers)
        self.clients = [host_workers([rank], model, *arguments, **theirs or {}) for rank in self.workers]
        self.open(self.trainer, arguments=trained, **mine)

    def open(self, trainer: Rank, *, arguments: tuple[Any, ...] = (7.0,), **mine: Any) -> None:
        """Have `trainer` link to all workers."""
        client = self.clients[0] if len(self.clients) == 1 else FanoutClient(self.clients)
        mine = {"mode": self.mode, "model": self.model, "arguments": arguments, **mine}
        trainer.call(open_trainer, client, **mine)

    def send(self, *, trainer: Rank | None = None) -> dict[str, Any]:
        """A round that succeeds: every worker has the trainer's weights."""
        sent = (trainer or self.trainer).call(send)
        assert [rank.call(model_digests) for rank in self.workers] == [sent["digests"]] * len(self.workers)
        return sent

    def drop(self, lost: Rank) -> None:
        """Have the trainer drive the other workers only."""
        place = self.workers.index(lost)
        del self.workers[place], self.clients[place]
        self.trainer.call(drive, FanoutClient(self.clients))

    def check(self, workers: Sequence[Rank], expected: dict[str, str]) -> None:
        """Workers are idle, whole, and hold `expected`."""
        for rank in workers:
            settled(lambda rank=rank: rank.call(info)["update"] == "none")  # type: ignore[misc]
            assert rank.call(info)["weights"] == "whole"
            assert rank.call(model_digests) == expected


def details(sent: dict[str, Any], rank: str) -> dict[str, Any]:
    """What a report says of one rank."""
    found: dict[str, Any] = next(one["details"] for one in sent["report"]["ranks"] if one["rank"] == rank)
    return found
