"""Random source layouts to random loaders between real processes: the same bits as plain loading, each byte once."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.tests.sharded_fleet import Pairs, State, boxes, close_host, digests, held, sent_by, serve, whole
from plugins.m2n.tests.fleet import Trainers
from plugins.m2n.tests.random_scenes import random_meta, strided
from weightwire.layout import ParamMeta
from weightwire.sink import as_sink
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank
from weightwire.testing.strategies import DTYPES

RANKS = 6


def viewed(random: Random, tensor: Any, rank: int, shards: int) -> Any:
    """A random chain of views; it depends on the shape of the tensor alone."""
    for _ in range(random.choice([0, 1, 1, 2, 3])):
        if not tensor.dim():
            return tensor.expand(random.randint(1, 3)) if random.random() < 0.3 else tensor
        dim = random.randrange(tensor.dim())
        size = tensor.shape[dim]
        kind = random.choice(
            ["chunk", "chunk", "split", "select", "narrow", "transpose", "expand", "step", "unflatten"]
        )
        if kind == "chunk":
            step = -(-size // shards)
            tensor = tensor.narrow(dim, min(rank * step, size), max(min(step, size - rank * step), 0))
        elif kind == "split" and size:
            tensor = random.choice(tensor.split(random.randint(1, size), dim))
        elif kind == "select" and size:
            tensor = tensor.select(dim, random.randrange(size))
        elif kind == "narrow" and size:
            low = random.randrange(size)
            tensor = tensor.narrow(dim, low, random.randint(1, size - low))
        elif kind == "transpose":
            tensor = tensor.permute(random.sample(range(tensor.dim()), tensor.dim()))
        elif kind == "expand" and tensor.dim() < 4:
            tensor = tensor.unsqueeze(dim).expand(*tensor.shape[:dim], 2, *tensor.shape[dim:])
        elif kind == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif kind == "unflatten" and size and tensor.dim() < 5:
            tensor = tensor.unflatten(dim, (-1, random.choice([n for n in range(1, size + 1) if size % n == 0])))
    return tensor


class Viewing(nn.Module):
    """Loads views of tensors into parameters of its own making, some of which share a storage."""

    def __init__(self, metadata: Sequence[ParamMeta], seed: int, rank: int, shards: int) -> None:
        super().__init__()
        self.seed, self.rank, self.shards = seed, rank, shards
        fused: dict[torch.dtype, list[tuple[str, torch.Size]]] = {}
        for meta in metadata:
            random = self.random(meta.name)
            for number in range(self.copies(random)):
                name = f"{meta.name}_{number}"
                shape = viewed(random, torch.empty(meta.shape, dtype=meta.dtype, device="meta"), rank, shards).shape
                kind = random.choice(["plain", "fused", "turned", "gapped"])
                if kind == "fused":
                    fused.setdefault(meta.dtype, []).append((name, shape))
                else:
                    self.place(name, self.storage(kind, shape, meta.dtype))
        for dtype, parts in fused.items():
            flat = torch.zeros(sum(shape.numel() + 1 for _, shape in parts), dtype=dtype)
            for name, shape in parts:  # an element after each is nobody's
                self.place(name, flat[: shape.numel()].view(shape))
                flat = flat[shape.numel() + 1 :]

    @staticmethod
    def copies(random: Random) -> int:
        return random.choice([0, 1, 1, 1, 2])

    @staticmethod
    def storage(kind: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if kind == "turned":
            return torch.zeros(shape[::-1], dtype=dtype).permute(tuple(reversed(range(len(shape)))))
        if kind == "gapped" and shape:
            return torch.zeros(*shape[:-1], 2 * shape[-1] + 1, dtype=dtype)[..., 1::2]
        return torch.zeros(shape, dtype=dtype)

    def place(self, name: str, tensor: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def random(self, name: str) -> Random:
        return Random(f"{self.seed}/{name}")

    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            random = self.random(name)
            for number in range(self.copies(random)):
                view = viewed(random, tensor, self.rank, self.shards)
                random.choice(["plain", "fused", "turned", "gapped"])
                self.get_parameter(f"{name}_{number}").data.copy_(view)


class Plain(nn.Module):
    """Holds everything under its own name."""

    def __init__(self, metadata: Sequence[ParamMeta]) -> None:
        super().__init__()
        for meta in metadata:
            self.register_parameter(meta.name, nn.Parameter(torch.zeros(meta.shape, dtype=meta.dtype), False))


def load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Plain loading of whole tensors."""
    with torch.no_grad():
        if isinstance(model, Viewing):
            model.load_weights(tensors.items())
        else:
            model.load_state_dict(tensors)


def model_of(
    state: State, index: int, count: int, metadata: Sequence[ParamMeta], seed: int, shards: int, plain: bool
) -> nn.Module:
    """The model of a worker rank; ranks that are equal modulo `shards` load alike."""
    return Plain(metadata) if plain and index % 2 else Viewing(metadata, seed, index % shards, shards)


def wanted_bytes(model: nn.Module, metadata: Sequence[ParamMeta]) -> int:
    """The bytes of different elements that a model loads, counted one by one."""
    read: dict[str, set[int]] = {}
    for copied in as_sink(model, strict=False).load_plan(metadata).copies:
        elements = np.arange({meta.name: meta.numel for meta in metadata}[copied.source])
        read.setdefault(copied.source, set()).update(strided(elements, copied.source_region).reshape(-1).tolist())
    return sum(len(read.get(meta.name, ())) * meta.dtype.itemsize for meta in metadata)


def check_fleet(lent: Sequence[Rank], random: Random) -> None:
    trainers = random.randint(1, RANKS - 1)
    workers = random.randint(1, RANKS - trainers)
    with_dtypes = [random_meta(random, f"p{number}", trainers) for number in range(random.randint(1, 6))]
    metadata = [
        ParamMeta(
            meta.name,
            random.choice(DTYPES),
            meta.shape,
            owners=meta.owners,
            mesh_shape=meta.mesh_shape,
            placements=meta.placements,
        )
        for meta in with_dtypes
    ]
    shards = random.choice([number for number in range(1, workers + 1) if workers % number == 0])
    arguments = (metadata, random.randrange(1 << 30), shards, random.random() < 0.3)
    options = {
        "buffer_bytes": random.choice([64, 100, 1000]),
        "num_buffers": random.randint(1, 4),
        "direct_bytes": random.choice([1, 16, 100]),
        "checksum": random.random() < 0.3,
    }
    receivers = lent[trainers : trainers + workers]
    in_place = random.random() < 0.2
    client = serve(receivers, model_of, *arguments, strict=False, staging="in_place" if in_place else "staged")
    fleet = Trainers(lent[:trainers], client, boxes, metadata, **options).opened()
    models = [model_of({}, index, workers, *arguments) for index in range(workers)]
    bound = [wanted_bytes(model, metadata) for model in models]
    for seed in (1, 2):
        report = fleet.send(seed)
        assert sent_by(report, "worker rank") == bound
        assert sum(sent_by(report, "trainer rank")) == sum(bound)
        assert report["verified"] == options["checksum"]
        for rank, model in zip(receivers, models, strict=True):
            load(model, whole(metadata, seed))
            assert rank.call(held) == digests(model)
    fleet.close()
    for rank in receivers:
        rank.call(close_host)


def check_fleets(ranks: BorrowRanks, examples: int) -> None:
    lent = ranks(RANKS)

    # A fleet that fails may take seconds to do so: it is reported as it is.
    @settings(max_examples=examples, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(st.integers(0, 1 << 32))
    def check(seed: int) -> None:
        check_fleet(lent, Random(seed))

    check()


def test_random_layouts_between_processes(ranks: BorrowRanks) -> None:
    check_fleets(ranks, 6)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_random_layouts_between_processes_often(ranks: BorrowRanks) -> None:
    check_fleets(ranks, 150)
