"""A trainer of several ranks whose parameters FSDP2 shards; functions for `Rank.call`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from plugins.vllm.tests.scene import State, trainer_for
from weightwire import HTTPVLLMWeightSyncClient
from weightwire.testing.pool import held_socket

SECRET = "0123456789abcdef0123456789abcdef"


def hold_port(state: State) -> int:
    """A port that this rank holds until its trainer listens on it."""
    state["held"] = held = held_socket()
    return int(held.getsockname()[1])


def shard(state: State, weights: Path) -> None:
    """Make a module of a checkpoint's names and tensors, every block and the rest sharded by FSDP2."""
    model = nn.Module()
    for name, tensor in load_file(weights).items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(tensor))
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.get_submodule("model.layers").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state["model"] = model


def fill(state: State, weights: Path) -> None:
    """Take other weights, as a step of training does."""
    tensors = load_file(weights)
    with torch.no_grad():
        for name, parameter in state["model"].named_parameters():
            parameter.copy_(distribute_tensor(tensors[name], parameter.device_mesh, parameter.placements))


def open_trainer(state: State, url: str, backend: str, port: int) -> None:
    """Make this rank's trainer engine."""
    state["trainer"] = trainer_for(
        HTTPVLLMWeightSyncClient(url, timeout=60.0),
        state["model"],
        backend,
        rank=distributed.get_rank(),
        num_trainer_ranks=distributed.get_world_size(),
        secret=SECRET,
        master_port=port,
        listen_socket=state.pop("held", None),
    )


def send(state: State, label: str) -> dict[str, Any]:
    """Send once; the report."""
    report: dict[str, Any] = state["trainer"].send_weights(weight_version=label, pause="keep").to_json()
    return report


def close(state: State) -> None:
    """Shut this rank's trainer engine down."""
    state.pop("trainer").shutdown()
