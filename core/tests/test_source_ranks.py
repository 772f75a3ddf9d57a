from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from core.tests.distributed_ranks import State, mesh_over, process_group
from weightwire.errors import SourceMismatch, Unsupported
from weightwire.layout import ParamMeta, Replicate, Shard, metadata_digest
from weightwire.source import ModuleSource, StateDictSource, WeightSource
from weightwire.source_check import checked
from weightwire.testing.fixtures import BorrowRanks


class Tied(nn.Module):
    """Rows that do not divide, rows fewer than ranks, a tied head, a scalar-like bias and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.block = nn.Linear(4, 5)
        self.small = nn.Linear(5, 2)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.block.register_buffer("mean", torch.arange(5.0))
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        out: Tensor = self.small(self.block(hidden)).sum() + self.head(hidden).sum()
        return out


def model() -> tuple[Tied, dict[str, Tensor]]:
    """The same on every rank, and a copy of all it holds."""
    torch.manual_seed(0)
    module = Tied()
    return module, {name: tensor.clone() for name, tensor in module.state_dict().items()}


def flat(module: nn.Module, world: int) -> None:
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))


def by_layers(module: Tied, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(module.block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def hybrid(module: nn.Module, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(module, mesh=mesh)


def two_ways(module: Tied, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(module, mesh["tp"], {"block": ColwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])


def columns(module: Tied, world: int) -> None:
    """Plain DTensors without FSDP, split along their last dimension."""
    mesh = init_device_mesh("cpu", (world,))
    dtensor.distribute_module(module, mesh, lambda name, part, mesh: shard_directly(part, mesh))
    module.head.weight = module.embed.weight


def shard_directly(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not isinstance(parameter, dtensor.DTensor):
            sharded = dtensor.distribute_tensor(parameter.detach(), mesh, [dtensor.Shard(parameter.ndim - 1)])
            module.register_parameter(name, nn.Parameter(sharded))


def observe(state: State, shard: Callable[[Tied, int], None], world: int, kind: str) -> dict[str, Any]:
    """Shard, and read everything a source says and yields on this rank."""
    module, original = model()
    shard(module, world)
    source = ModuleSource(module, buffers=True) if kind == "module" else StateDictSource(module.state_dict)
    rank = torch.distributed.get_rank()
    return {
        "original": original,
        "metadata": source.metadata,
        "digest": metadata_digest(source.metadata),
        "mesh ranks": source.mesh_ranks(),
        "gathered": source.gathered,
        "full": [{meta.name: tensor.clone() for meta, tensor in pairs_of(source, None)} for _ in range(2)],
        "local": {meta.name: tensor.clone() for meta, tensor in pairs_of(source, rank)},
    }


def pairs_of(source: WeightSource, local_rank: int | None) -> Any:
    pairs = source.iter_full() if local_rank is None else source.iter_local()
    return checked(pairs, source.metadata, local_rank=local_rank)


@pytest.mark.parametrize("kind", ["module", "state dict"])
@pytest.mark.parametrize(
    ("shard", "world"),
    [
        pytest.param(flat, 2, marks=pytest.mark.thorough),
        (flat, 4),
        (by_layers, 4),
        (hybrid, 4),
        (two_ways, 4),
        (columns, 4),
    ],
)
def test_every_rank_yields_what_it_declares(
    strict_ranks: BorrowRanks, tmp_path: Path, shard: Callable[[Tied, int], None], world: int, kind: str
) -> None:
    with process_group(strict_ranks, world, tmp_path) as group:
        seen = group.run(observe, shard, world, kind)
    metadata: list[ParamMeta] = seen[0]["metadata"]
    original: dict[str, Tensor] = seen[0]["original"]
    assert {meta.name for meta in metadata} == original.keys() - {"head.weight"}
    assert len({view["digest"] for view in seen}) == 1
    for rank, view in enumerate(seen):
        assert view["mesh ranks"] == set(range(world))
        assert view["gathered"] == {}
        for meta in metadata:
            whole = original[meta.name]
            assert (meta.shape, meta.dtype) == (tuple(whole.shape), whole.dtype)
            assert all(torch.equal(full[meta.name], whole) for full in view["full"])
            piece = view["local"][meta.name]
            assert torch.equal(piece, whole[meta.box(rank).slices()].reshape(piece.shape))


def test_uneven_rows_and_an_empty_piece(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(strict_ranks, 4, tmp_path) as group:
        seen = group.run(observe, flat, 4, "module")
    shapes = {name: [tuple(view["local"][name].shape) for view in seen] for name in seen[0]["local"]}
    assert shapes["embed.weight"] == [(3, 4), (3, 4), (3, 4), (1, 4)]
    assert shapes["block.weight"] == [(2, 4), (2, 4), (1, 4), (0, 4)]
    assert shapes["small.bias"] == [(1,), (1,), (0,), (0,)]
    assert shapes["block.mean"] == [(5,)] * 4


def test_hybrid_sharding_is_replicas_of_shards(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(strict_ranks, 4, tmp_path) as group:
        first = group.run(observe, hybrid, 4, "module")[0]
    embed = first["metadata"][0]
    assert (embed.mesh_shape, embed.placements) == ((2, 2), (Replicate(), Shard(0)))
    assert embed.box(0) == embed.box(2) != embed.box(1)


def test_a_slice_of_a_mesh_counts_with_its_siblings(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(strict_ranks, 4, tmp_path) as group:
        first = group.run(observe, two_ways, 4, "module")[0]
    embed, block = first["metadata"][:2]
    assert (embed.owners, embed.mesh_shape, embed.placements) == ((0, 2, 1, 3), (2, 2), (Replicate(), Shard(0)))
    assert (block.owners, block.mesh_shape, block.placements) == ((0, 2, 1, 3), (2, 2), (Shard(0), Shard(0)))


# Reading metadata


def keep_source(state: State, world: int) -> None:
    module, _ = model()
    two_ways(module, world)
    state["source"] = ModuleSource(module, buffers=True)


def read_metadata(state: State) -> tuple[str, dict[str, int]]:
    source: ModuleSource = state["source"]
    list(source.iter_local())
    return metadata_digest(source.metadata), source.gathered


def test_metadata_and_local_pieces_need_no_other_rank(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(strict_ranks, 4, tmp_path) as group:
        group.run(keep_source, 4)
        alone = [rank.call(read_metadata, timeout=10) for rank in reversed(group.ranks)]
    assert alone == [(alone[0][0], {})] * 4


def after_forward(state: State, world: int) -> tuple[str, str, list[bool]]:
    """A forward pass leaves FSDP2's root gathered, in another dtype; backward must still work afterwards."""
    module, original = model()
    fully_shard(
        module, mesh=init_device_mesh("cpu", (world,)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    before = metadata_digest(ModuleSource(module).metadata)
    loss = module(torch.tensor([1, 2, 3]))
    source = ModuleSource(module)
    full = {name: tensor.clone() for name, tensor in source.iter_full()}
    loss.backward()
    same = [torch.equal(tensor, original[name]) for name, tensor in full.items()]
    same += [parameter.grad is not None for parameter in module.parameters()]
    return before, metadata_digest(source.metadata), same


def test_metadata_does_not_depend_on_when_it_is_read(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(strict_ranks, 2, tmp_path) as group:
        for before, after, same in group.run(after_forward, 2):
            assert before == after
            assert all(same)


# What no box describes


def partial_and_strided(state: State, world: int) -> dict[str, Any]:
    """A sum that is not yet made, and strides that no order of axes explains."""
    rank = torch.distributed.get_rank()
    line = mesh_over(state, tuple(range(world)), (world,))
    rows = torch.arange(24.0).reshape(12, 2)
    source = StateDictSource(
        {
            "plain": torch.ones(3),
            "partial": dtensor.DTensor.from_local(torch.full((2, 2), float(rank)), line, [dtensor.Partial()]),
            "strided": dtensor.distribute_tensor(rows, line, [_StridedShard(0, split_factor=3)]),
        }
    )
    metadata = source.metadata
    return {
        "gathered": source.gathered,
        "reasons": source.gather_reasons,
        "metadata": metadata,
        "local": {
            meta.name: tensor.clone() for meta, tensor in checked(source.iter_local(), metadata, local_rank=rank)
        },
        "full": {meta.name: tensor.clone() for meta, tensor in checked(source.iter_full(), metadata)},
    }


def test_what_no_box_describes_is_gathered_and_said(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(strict_ranks, 4, tmp_path) as group:
        seen = group.run(partial_and_strided, 4)
    for view in seen:
        assert view["gathered"] == {"partial": 16, "strided": 96}
        assert "_StridedShard(dim=0, sf=3)" in view["reasons"]["strided"]
        assert "Partial" in view["reasons"]["partial"]
        for mode in ("local", "full"):
            assert torch.equal(view[mode]["partial"], torch.full((2, 2), 6.0))
            assert torch.equal(view[mode]["strided"], torch.arange(24.0).reshape(12, 2))
    strided = seen[0]["metadata"][2]
    assert (strided.owners, strided.mesh_shape, strided.placements) == ((0, 1, 2, 3), (4,), None)


# Partial owners


def stages(state: State) -> dict[str, Any]:
    """Two pipeline stages of two ranks: each parameter has its own mesh, and ranks hold different parts."""
    rank = torch.distributed.get_rank()
    first, second = mesh_over(state, (0, 1), (2,)), mesh_over(state, (2, 3), (2,))
    rows = torch.arange(10.0).reshape(5, 2)
    source = StateDictSource(
        {
            "first": dtensor.distribute_tensor(rows, first, [dtensor.Shard(0)], src_data_rank=None),
            "second": dtensor.distribute_tensor(-rows, second, [dtensor.Shard(0)], src_data_rank=None),
        }
    )
    owned = [meta for meta in source.metadata if meta.owned_by(rank)]
    return {
        "digest": metadata_digest(source.metadata),
        "owned": source.owned_names(rank),
        "first owners": [meta.first_owner for meta in source.metadata],
        "full": {meta.name: tensor.clone() for meta, tensor in checked(source.iter_full(), owned)},
        "local": {meta.name: tensor.clone() for meta, tensor in checked(source.iter_local(), owned, local_rank=rank)},
    }


def test_a_rank_iterates_what_it_owns(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(strict_ranks, 4, tmp_path) as group:
        seen = group.run(stages)
    rows = torch.arange(10.0).reshape(5, 2)
    assert len({view["digest"] for view in seen}) == 1
    assert [view["owned"] for view in seen] == [["first"], ["first"], ["second"], ["second"]]
    assert seen[0]["first owners"] == [0, 2]
    for view in seen:
        assert list(view["full"]) == list(view["local"]) == view["owned"]
    assert torch.equal(seen[0]["full"]["first"], rows)
    assert torch.equal(seen[2]["full"]["second"], -rows)
    assert torch.equal(seen[2]["local"]["second"], -rows[:3])
    assert torch.equal(seen[3]["local"]["second"], -rows[3:])


def descending(state: State) -> dict[str, Any]:
    mesh = mesh_over(state, (1, 0), (2,))
    rows = torch.arange(10.0).reshape(5, 2)
    source = StateDictSource({"rows": dtensor.distribute_tensor(rows, mesh, [dtensor.Shard(0)], src_data_rank=None)})
    with pytest.raises(Unsupported, match=r"ascending order of ranks, and the device mesh is \[1, 0\]"):
        next(source.iter_full())
    return {name: piece.clone() for name, piece in source.iter_local()}


def test_a_mesh_that_torch_would_gather_in_another_order(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(strict_ranks, 2, tmp_path) as group:
        seen = group.run(descending)
    assert [len(view["rows"]) for view in seen] == [2, 3]


# Wrappers


def wrapped(state: State, world: int) -> list[str]:
    module, _ = model()
    return [meta.name for meta in ModuleSource(nn.parallel.DistributedDataParallel(module)).metadata]


def test_a_data_parallel_wrapper_is_seen_through(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(strict_ranks, 2, tmp_path) as group:
        names = group.run(wrapped, 2)
    assert names[0] == names[1] == [name for name, _ in Tied().named_parameters()]


def flattened(state: State) -> None:
    source = ModuleSource(
        FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    )
    with pytest.raises(Unsupported, match="FSDP1.*fully_shard"):
        _ = source.metadata


def test_fsdp1_is_refused(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(strict_ranks, 2, tmp_path) as group:
        group.run(flattened)


def careless(state: State, world: int) -> None:
    module, _ = model()
    flat(module, world)
    metadata = ModuleSource(module).metadata
    with pytest.raises(SourceMismatch, match="'embed.weight' at index 0 as a DTensor, not a plain tensor"):
        next(checked(module.named_parameters(), metadata))


def test_a_dtensor_is_no_whole_tensor(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(strict_ranks, 2, tmp_path) as group:
        group.run(careless, 2)
