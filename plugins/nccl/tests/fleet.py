"""Models, trainers and workers for the tests of this transport; module-level, so that ranks can run them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from weightwire.layout import ParamMeta
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource, WeightSource
from weightwire.testing.pool import held_socket
from weightwire_nccl import NCCLTrainerInitInfo

State = dict[str, Any]
SECRET = "5a" * 16


class Zoo(nn.Module):
    """Parameters of many dtypes and shapes: small ones that are packed, large ones that are not, odd ones."""

    def __init__(self, seed: int, *, width: int = 700) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def filled(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            if dtype.is_floating_point and dtype.itemsize > 1:
                data = torch.randn(shape, generator=generator).to(dtype)
            else:
                size = torch.Size(shape).numel() * dtype.itemsize
                # Seven bits keep every fp8 and bool pattern a number.
                data = torch.randint(0, 2, (size,), generator=generator, dtype=torch.uint8)
                data = data.view(dtype).reshape(shape)
            return nn.Parameter(data, requires_grad=False)

        self.norm = filled(7, dtype=torch.bfloat16)
        self.scale = filled(3, dtype=torch.float8_e4m3fn)
        self.wide = filled(width, width)
        self.scalar = filled()
        self.hollow = filled(0, 4)
        self.counts = filled(5, dtype=torch.int64)
        self.mask = filled(3, dtype=torch.bool)
        self.sixteen = filled(width, 3, dtype=torch.float16)
        self.sixtyfour = filled(2, 2, dtype=torch.float64)
        self.last = filled(width, width, dtype=torch.bfloat16)


def weights(state: State, seed: int = 0, width: int = 700) -> nn.Module:
    """A worker's model."""
    state["model"] = model = Zoo(seed, width=width)
    return model


def checksums(model: nn.Module) -> dict[str, str]:
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


def open_trainer(
    state: State,
    client: Any,
    *,
    model: Callable[..., nn.Module] = weights,
    arguments: tuple[Any, ...] = (1,),
    rank: int = 0,
    count: int = 1,
    owned: bool = False,
    port: int = 0,
    **info: Any,
) -> list[str]:
    """Make a trainer engine in this rank; returns the names of its parameters."""
    trained = model(state, *arguments)
    source = OwnedSource(trained, rank, count) if owned else ModuleSource(trained)
    info = {"timeout": 60.0, **info}
    if count > 1:
        info |= {"rank": rank, "num_trainer_ranks": count, "secret": SECRET, "master_port": port}
        info["listen_socket"] = state.get("held")
    state["trainer"] = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(**info), client=client, source=source
    )
    return [name for name, _ in trained.named_parameters()]


def send(state: State, label: str | None = None, *, step: bool = False, timeout: float | None = None) -> dict[str, Any]:
    """Send once, after an optional change of every parameter; returns the report and the trainer's checksums."""
    if step:
        with torch.no_grad():
            for parameter in state["model"].parameters():
                if parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1:
                    parameter.add_(1)
    report = state["trainer"].send_weights(weight_version=label, timeout=timeout)
    return {"report": report.to_json(), "checksums": checksums(state["model"])}


def without(state: State, client: Any) -> None:
    """Have the trainer drive `client` from now on."""
    state["trainer"].client = client


def hold_port(state: State) -> int:
    """A port that this rank holds until its trainer listens on it."""
    state["held"] = held = held_socket()
    port: int = held.getsockname()[1]
    return port


def close(state: State) -> None:
    """Shut the trainer down."""
    state["trainer"].shutdown()


def model_checksums(state: State) -> dict[str, str]:
    """Checksums of this rank's model."""
    return checksums(state["model"])
