"""What does not fit the model is refused by its name, before a byte of it moves, and nothing changes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests.conftest import Connect, Models
from plugins.vllm.tests.scene import Server
from weightwire import StateDictSource
from weightwire.errors import WeightwireError

pytestmark = pytest.mark.vllm

LAYER = "model.layers.1.self_attn"
Weights = dict[str, Tensor]


def other_name(weights: Weights) -> None:
    weights["model.layers.1.self_attn.x_proj.weight"] = weights.pop(f"{LAYER}.k_proj.weight")


def another_name(weights: Weights) -> None:
    weights["model.nothing.weight"] = torch.zeros(3, dtype=torch.float32)


def other_shape(weights: Weights) -> None:
    weights["model.norm.weight"] = torch.zeros(127, dtype=torch.float32)


def other_shape_of_a_shard(weights: Weights) -> None:
    weights[f"{LAYER}.k_proj.weight"] = torch.zeros(32, 128, dtype=torch.float32)


def other_dtype(weights: Weights) -> None:
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(256, 128, dtype=torch.bfloat16)


def without_k_proj(weights: Weights) -> None:
    del weights[f"{LAYER}.k_proj.weight"]


def without_a_norm(weights: Weights) -> None:
    del weights["model.layers.0.input_layernorm.weight"]


CASES = [
    (other_name, "x_proj"),
    (another_name, "model.nothing"),
    (other_shape, "model.norm.weight"),
    (other_shape_of_a_shard, f"{LAYER}.k_proj.weight"),
    (other_dtype, "model.layers.0.mlp.up_proj.weight"),
    (without_k_proj, f"{LAYER}.qkv_proj.weight"),
    (without_a_norm, "model.layers.0.input_layernorm.weight"),
]


@pytest.mark.parametrize(("change", "named"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_refused_by_name(
    server: Server, models: Models, connect: Connect, change: Callable[[Weights], None], named: str
) -> None:
    weights = {name: tensor.detach() for name, tensor in models.new.module.state_dict().items()}
    change(weights)
    trainer = connect(server.client, StateDictSource(weights))
    moved: list[int] = []
    trainer.on_progress = lambda event: moved.append(event.bytes_done)
    with pytest.raises(WeightwireError, match=re.escape(named)):
        trainer.send_weights(weight_version="refused", pause="wait")
    assert not any(moved)
    assert not server.paused()
    assert server.greedy() == models.old.greedy()
    assert server.label() == "old"
    trainer.shutdown()
    connect(server.client, models.new.module).send_weights(weight_version="new")
    assert server.greedy() == models.new.greedy()
    assert server.label() == "new"
