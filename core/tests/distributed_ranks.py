"""What the ranks of the layout and source tests do; functions for `Rank.call`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _collective_utils, _redistribute

from weightwire.testing.fixtures import BorrowRanks

State = dict[str, Any]
T = TypeVar("T")


def join(state: State, rank: int, world: int, store: str) -> None:
    """Make the default process group, which a DTensor needs; weightwire never does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=20)
    )
    state["meshes"] = {}


def leave(state: State) -> None:
    """Destroy it, and all that keeps its threads alive: DTensor's caches hold meshes, which hold their groups."""
    state.clear()
    dist.destroy_process_group()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


class Group:
    """Ranks with a default process group."""

    def __init__(self, ranks: BorrowRanks, world: int, store: Path) -> None:
        self.ranks = ranks(world)
        self._each(lambda index: (join, index, world, str(store)))

    def _each(self, arguments: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        pending = [rank.start(*arguments(index)) for index, rank in enumerate(self.ranks)]
        return [call.result() for call in pending]

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Call `function(state, *args, **kwargs)` on all ranks at once; what each returned, by rank."""
        pending = [rank.start(function, *args, **kwargs) for rank in self.ranks]
        return [call.result() for call in pending]

    def leave(self) -> None:
        self.run(leave)


@contextmanager
def process_group(ranks: BorrowRanks, world: int, store: Path) -> Iterator[Group]:
    """`world` ranks in one process group, which is destroyed at the end if all went well."""
    group = Group(ranks, world, store / "store")
    yield group
    group.leave()


def mesh_over(state: State, owners: tuple[int, ...], shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh that is made once in each rank: it makes process groups, which every rank must join in."""
    meshes: dict[Any, DeviceMesh] = state["meshes"]
    if (owners, shape) not in meshes:
        meshes[owners, shape] = DeviceMesh("cpu", torch.tensor(owners).reshape(shape))
    return meshes[owners, shape]
