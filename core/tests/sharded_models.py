"""A model as it is trained, in several layouts, and as a tensor-parallel server holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from core.tests.sharded_fleet import Pairs, State, digests, held, sent_by
from weightwire.source import ModuleSource, WeightSource
from weightwire.testing.pool_process import Rank

HIDDEN, HEADS, INTERMEDIATE, VOCABULARY = 8, 12, 10, 14


# What is trained


class Block(nn.Module):
    """Projections as a trainer holds them: each by itself, heads and rows that do not divide by four."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS)
        self.k_proj = nn.Linear(HIDDEN, HEADS // 2)
        self.v_proj = nn.Linear(HIDDEN, HEADS // 2)
        self.o_proj = nn.Linear(HEADS, HIDDEN, bias=False)
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.norm = nn.Parameter(torch.ones(HIDDEN))


class Policy(nn.Module):
    """An embedding that is tied to the head, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight


class StepSource(ModuleSource):
    """A module, of which every round sends what it holds plus a number."""

    seed = 0

    def resident(self) -> None:
        return None

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().iter_local():
            yield name, tensor.detach() + self.seed


def flat(policy: nn.Module, world: int) -> None:
    fully_shard(policy, mesh=init_device_mesh("cpu", (world,)))


def hybrid(policy: nn.Module, world: int) -> None:
    fully_shard(policy, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))


def two_ways(policy: nn.Module, world: int) -> None:
    """FSDP2 over tensor parallelism: two axes shard the rows of the column-parallel projections."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel())
    for block in policy.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], {**columns, "o_proj": RowwiseParallel(), "down_proj": RowwiseParallel()})
    fully_shard(policy, mesh=mesh["dp"])


def sharded(state: State, rank: int, count: int, shard: Callable[[nn.Module, int], None]) -> WeightSource:
    policy = Policy()
    shard(policy, count)
    return StepSource(policy)


def policy_tensors(seed: int) -> dict[str, Tensor]:
    return {name: tensor.detach() + seed for name, tensor in Policy().named_parameters()}


# What serves


def shard_of(tensor: Any, dim: int, rank: int, ranks: int) -> Any:
    size = tensor.shape[dim] // ranks
    return tensor.narrow(dim, rank * size, size)


class Served(nn.Module):
    """One rank of a tensor-parallel server: fused projections, a padded vocabulary, a tied head."""

    FUSED: ClassVar = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        rows = -(-VOCABULARY // (2 * ranks)) * 2
        self.embed = nn.Parameter(torch.zeros(rows, HIDDEN))
        self.head = self.embed
        for number in range(2):
            block = nn.Module()
            block.qkv = nn.Parameter(torch.zeros(2 * HEADS // ranks, HIDDEN))
            block.qkv_bias = nn.Parameter(torch.zeros(2 * HEADS // ranks))
            block.gate_up = nn.Parameter(torch.zeros(2 * INTERMEDIATE // ranks, HIDDEN))
            block.o_proj = nn.Parameter(torch.zeros(HIDDEN, HEADS // ranks))
            block.down_proj = nn.Parameter(torch.zeros(HIDDEN, INTERMEDIATE // ranks))
            block.norm = nn.Parameter(torch.zeros(HIDDEN))
            self.add_module(f"block{number}", block)

    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            if name == "embed.weight":
                rows = len(self.embed)
                mine = tensor[self.rank * rows : (self.rank + 1) * rows]
                self.embed.data[: len(mine)].copy_(mine)
                continue
            _, number, part, *kind = name.split(".")
            self.load_part(self.get_submodule(f"block{number}"), part, kind == ["bias"], tensor)

    def load_part(self, block: Any, part: str, bias: bool, tensor: Any) -> None:
        if part in ("o_proj", "down_proj"):
            getattr(block, part).data.copy_(shard_of(tensor, 1, self.rank, self.ranks))
        elif part == "norm":
            block.norm.data.copy_(tensor)
        else:
            size = tensor.shape[0] // self.ranks
            start = {"q_proj": 0, "k_proj": 2, "v_proj": 3, "gate_proj": 0, "up_proj": 1}[part] * size
            fused = getattr(block, self.FUSED[part] + "_bias" * bias)
            fused.data.narrow(0, start, size).copy_(shard_of(tensor, 0, self.rank, self.ranks))


def served(state: State, index: int, count: int) -> nn.Module:
    return Served(index, count)


def check_served(report: dict[str, Any], workers: list[Rank], seed: int) -> None:
    """Hold a server's ranks against plain loading, and the report against the fewest bytes that can be moved."""
    tensors = policy_tensors(seed)
    for index, rank in enumerate(workers):
        expected = Served(index, len(workers))
        expected.load_weights(tensors.items())
        assert rank.call(held) == digests(expected)
    halves = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" not in name)
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name)
    assert sum(sent_by(report, "worker rank")) == halves + len(workers) * norms
    assert sum(sent_by(report, "trainer rank")) == halves + len(workers) * norms
