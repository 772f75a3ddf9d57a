from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from core.tests.distributed_ranks import State, mesh_over, process_group
from weightwire.dtensor import mesh_layout
from weightwire.layout import ParamMeta, Placement, Shard
from weightwire.source import ModuleSource
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.strategies import placements, shapes

MESHES = [
    ((0, 1, 2, 3), (4,)),
    ((0, 1, 2, 3), (2, 2)),
    ((3, 1, 0, 2), (4, 1)),
    ((2, 0, 3, 1), (1, 2, 2)),
    ((3, 0, 2), (3,)),
    ((1,), (1,)),
]


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def native(placement: Placement) -> dtensor.Placement:
    return dtensor.Shard(placement.dim) if isinstance(placement, Shard) else dtensor.Replicate()


def distribute(state: State, described: list[ParamMeta]) -> list[tuple[Tensor, ParamMeta] | None]:
    """For each: this rank's piece by DTensor, and what its layout is read as; None where it has no part."""
    found: list[tuple[Tensor, ParamMeta] | None] = []
    for meta in described:
        assert meta.owners is not None
        assert meta.mesh_shape is not None
        mesh = mesh_over(state, meta.owners, meta.mesh_shape)
        if mesh.get_coordinate() is None:
            found.append(None)
            continue
        chosen = [native(placement) for placement in meta.placements or ()] or [dtensor.Replicate()] * mesh.ndim
        tensor = dtensor.distribute_tensor(numbered(meta.shape), mesh, chosen, src_data_rank=None)
        read = mesh_layout(tensor)
        again = ParamMeta(
            meta.name,
            meta.dtype,
            tuple(tensor.shape),
            owners=read.owners,
            mesh_shape=read.mesh_shape,
            placements=read.placements,
        )
        found.append((tensor.to_local(), again))
    return found


@st.composite
def on_four_ranks(draw: st.DrawFn) -> ParamMeta:
    shape = draw(shapes())
    owners, mesh_shape = draw(st.sampled_from(MESHES))
    chosen = draw(placements(shape, mesh_shape))
    return ParamMeta("w", torch.int64, shape, owners=owners, mesh_shape=mesh_shape, placements=chosen)


def test_box_is_what_dtensor_holds(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(strict_ranks, 4, tmp_path) as group:

        @settings(max_examples=15)
        @given(st.lists(on_four_ranks(), min_size=1, max_size=12))
        def compare(described: list[ParamMeta]) -> None:
            for rank, found in enumerate(group.run(distribute, described)):
                for meta, held in zip(described, found, strict=True):
                    assert (held is not None) == meta.owned_by(rank)
                    if held is not None:
                        piece, read = held
                        assert piece.shape == meta.local_shape(rank)
                        assert torch.equal(piece, numbered(meta.shape)[meta.box(rank).slices()].reshape(piece.shape))
                        assert read == meta

        compare()


class Block(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, rows, bias=False)
        self.down = nn.Linear(rows, 6, bias=False)


def shard_two_ways(state: State, mesh_shape: tuple[int, int], rows: int) -> dict[str, Any]:
    """FSDP2 over tensor parallelism; the original weights, and what the source reads and yields on this rank."""
    torch.manual_seed(0)
    block = Block(rows)
    original = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
    source = ModuleSource(block)
    return {
        "torch": [str(parameter.placements) for parameter in block.parameters()],  # type: ignore[attr-defined]
        "original": original,
        "metadata": source.metadata,
        "gathered": source.gathered,
        "local": {name: piece.clone() for name, piece in source.iter_local()},
        "full": {name: whole.clone() for name, whole in source.iter_full()},
    }


@pytest.mark.parametrize(
    ("mesh_shape", "rows"),
    # On 3 by 2, 7 and 13 rows are where DTensor itself computes other local shapes than FSDP2 holds.
    [((2, 2), 8), ((2, 2), 10), ((2, 2), 5), ((2, 2), 3), ((3, 2), 7), ((3, 2), 13)],
)
def test_fsdp_over_tensor_parallelism(
    strict_ranks: BorrowRanks, tmp_path: Path, mesh_shape: tuple[int, int], rows: int
) -> None:
    world = mesh_shape[0] * mesh_shape[1]
    with process_group(strict_ranks, world, tmp_path) as group:
        seen = group.run(shard_two_ways, mesh_shape, rows)
    metadata: list[ParamMeta] = seen[0]["metadata"]
    assert "_StridedShard" in seen[0]["torch"][0]
    up, down = metadata
    assert up.owners == tuple(torch.arange(world).reshape(mesh_shape).T.flatten().tolist())
    assert (up.mesh_shape, up.placements) == (mesh_shape[::-1], (Shard(0), Shard(0)))
    assert (down.mesh_shape, down.placements) == (mesh_shape, (Shard(0), Shard(1)))
    for rank, view in enumerate(seen):
        assert view["metadata"] == metadata
        assert view["gathered"] == {}
        for meta in metadata:
            original = seen[0]["original"][meta.name]
            piece = view["local"][meta.name]
            assert piece.shape == meta.local_shape(rank)
            assert torch.equal(piece, original[meta.box(rank).slices()].reshape(piece.shape))
            assert torch.equal(view["full"][meta.name], original)
