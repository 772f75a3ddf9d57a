"""What the ranks of the sink tests do; functions for `Rank.call`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from core.tests.patch_scenes import assert_outcome, boxes_of
from core.tests.sink_models import metadata, same_bits, spec_of
from weightwire.errors import UpdateRefused
from weightwire.module_sink import ModuleSink
from weightwire.sink import CommitReport, Patch

State = dict[str, Any]


def join(state: State, rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, world), rank=rank, world_size=world)


def leave(state: State) -> None:
    state.clear()
    dist.destroy_process_group()


def network() -> nn.Sequential:
    """Rows that do not divide by two or four among them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7), nn.Linear(7, 1, bias=False))


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in network().named_parameters()}


def push(sink: ModuleSink, new: dict[str, torch.Tensor], way: str) -> CommitReport:
    sink.begin(spec_of(new))
    if way == "load":
        sink.load(new.items())
    elif way == "patch":
        plan = sink.load_plan(metadata(new))
        sink.patch([patch for name, value in new.items() for patch in in_boxes(name, value)])
        assert_outcome(sink, plan, new)
    else:
        for name, target in sink.targets(new).items():
            assert target.shape == new[name].shape
            target.copy_(new[name])
        sink.received(new)
    sink.prepare()
    return sink.commit()


def in_boxes(name: str, value: torch.Tensor) -> Iterator[Patch]:
    """All elements of a tensor, in the parts that several senders have."""
    draw = random.Random(name)
    for box in boxes_of(value.shape, draw):
        part = (value if box is None else value[box.slices()]).reshape(-1)
        positions = torch.tensor(draw.sample(range(len(part)), len(part)), dtype=torch.int64)
        yield Patch(name, positions, part[positions], box) if draw.random() < 0.5 else Patch(name, None, part, box)


def forward_of(new: dict[str, torch.Tensor]) -> torch.Tensor:
    plain = network()
    plain.load_state_dict(new)
    with torch.no_grad():
        return plain(torch.ones(2, 6))  # type: ignore[no-any-return]


def receive_into(model: nn.Module, options: dict[str, Any], expected: int) -> None:
    """Push by every way, with forward passes between, and compare outputs and full tensors."""
    sink = ModuleSink(model, **options)
    ways = ("load", "targets", "patch", "load", "targets")
    for seed, way in enumerate(ways, start=1):
        new = values(seed)
        report = push(sink, new, way)
        if way == "targets":
            assert report.copied_because == {"DTensor": expected}
        with torch.no_grad():
            assert torch.allclose(whole(model(torch.ones(2, 6))), forward_of(new), atol=1e-5), (way, options)
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                assert same_bits(parameter.full_tensor(), new[name]), name
    assert len(sink.checksums()) == len(new)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fsdp(state: State, options: dict[str, Any]) -> None:
    """Once with all layers wrapped, once with the root alone, which keeps what it gathered after a forward pass."""
    for wrapped in (True, False):
        model = network()
        for layer in model if wrapped else ():
            fully_shard(layer)
        fully_shard(model)
        receive_into(model, options, expected=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()


def tensor_parallel(state: State, options: dict[str, Any]) -> None:
    """Over two ranks alone, over four under FSDP2."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    model = network()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if ranks > 2:
        for layer in model:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    receive_into(model, options, expected=4 if ranks == 2 else 5)


def all_on_two(state: State, options: dict[str, Any]) -> None:
    fsdp(state, options)
    tensor_parallel(state, options)
    refused(state)


def all_on_four(state: State) -> None:
    tensor_parallel(state, {})
    placements(state)


def placements(state: State) -> None:
    """Every pair of placements on a 2-D mesh, and both kinds a sink refuses."""
    mesh = init_device_mesh("cpu", (2, 2))
    model = nn.Module()
    full = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
    kinds = (Replicate(), Shard(0), Shard(1))
    for index, (one, other) in enumerate((one, other) for one in kinds for other in kinds):
        piece = distribute_tensor(torch.zeros_like(full), mesh, [one, other])
        model.register_parameter(f"p{index}", nn.Parameter(piece))
    sink = ModuleSink(model)
    for way in ("load", "targets", "patch"):
        new = {name: full + index for index, (name, _) in enumerate(model.named_parameters())}
        push(sink, new, way)
        assert all(same_bits(whole(p), new[name]) for name, p in model.named_parameters())
        full = full + 100
    dist.barrier()


def refused(state: State) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Module()
    model.register_parameter("p", nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Partial()])))
    with pytest.raises(UpdateRefused, match="not boxes"):
        ModuleSink(model).begin(spec_of({"p": torch.zeros(3)}))
