"""Sources whose tensors change a little from step to step, the same in every process."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.tests.sharded_fleet import BoxSource, Named, State, digests, full
from core.tests.sharded_models import Policy, Served
from weightwire.layout import ParamMeta
from weightwire.source import ModuleSource, WeightSource, as_bytes

STEP_SHARE = 0.05


def changed(name: str, tensor: Tensor, step: int, share: float = STEP_SHARE) -> Tensor:
    """What a tensor is after `step` steps, each of which gives new random bits to some of its elements."""
    result = tensor.detach().contiguous().clone()
    rows = as_bytes(result).view(-1, result.element_size()) if result.numel() else None
    for number in range(1, step + 1):
        random = torch.Generator().manual_seed(zlib.crc32(f"{name}/{number}".encode()))
        if rows is not None:
            chosen = torch.rand(len(rows), generator=random) < share
            low = 2 if result.dtype == torch.bool else 256
            fresh = torch.randint(0, low, rows.shape, generator=random, dtype=torch.uint8)
            rows[chosen] = fresh[chosen]
    return result


class ChangingSource(BoxSource):
    """One rank's boxes of tensors at step `seed`.

    Attributes:
        held: Names that do not change.
    """

    def __init__(
        self, metadata: Sequence[ParamMeta], rank: int, *, scope: str = "full", held: Sequence[str] = ()
    ) -> None:
        super().__init__(metadata, rank, scope=scope)
        self.held = set(held)
        self.seed = 0

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for meta in self._metadata:
            if meta.owned_by(self._rank):
                step = 0 if meta.name in self.held else self.seed
                slices = tuple(slice(start, start + size) for start, size in self._extents(meta))
                yield meta.name, at_step(meta, step)[slices]


def at_step(meta: ParamMeta, step: int) -> Tensor:
    """What a parameter holds after `step` steps."""
    return changed(meta.name, full(meta, 0), step)


def changing(state: State, rank: int, count: int, metadata: Sequence[ParamMeta], scope: str = "full") -> WeightSource:
    """A trainer rank's source."""
    return ChangingSource(metadata, rank, scope=scope)


def loaded_at(metadata: Sequence[ParamMeta], names: Sequence[str], step: int) -> dict[str, str]:
    """Digests of what a `Named` model holds after plain loading of that step."""
    model = Named(metadata, names)
    model.load_weights((meta.name, at_step(meta, step)) for meta in metadata)
    return digests(model)


class ChangingPolicy(ModuleSource):
    """A sharded `Policy` at step `seed`; every rank works out the whole step and takes its own part of it."""

    def __init__(self, policy: nn.Module, rank: int) -> None:
        super().__init__(policy)
        self._rank = rank
        self._reference = dict(Policy().named_parameters())
        self.seed = 0

    def resident(self) -> None:
        return None

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        declared = {meta.name: meta for meta in self.metadata}
        for name, _ in super().iter_local():
            meta = declared[name]
            box = meta.box(self._rank)
            now = changed(name, self._reference[name], self.seed)
            yield name, now[box.slices()].reshape(meta.local_shape(self._rank))


def policy_at(step: int) -> dict[str, Tensor]:
    """The whole policy at a step."""
    return {name: changed(name, tensor, step) for name, tensor in Policy().named_parameters()}


def sharded_policy(state: State, rank: int, count: int, shard: Any) -> WeightSource:
    """A trainer rank's part of the policy."""
    policy = Policy()
    shard(policy, count)
    return ChangingPolicy(policy, rank)


def served_at(index: int, count: int, step: int) -> dict[str, str]:
    """Digests of what a tensor-parallel rank holds after plain loading of that step."""
    model = Served(index, count)
    model.load_weights(policy_at(step).items())
    return digests(model)
