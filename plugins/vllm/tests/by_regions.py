"""Updates by regions of vLLM's own models, without a transport; module-level, so that a rank can run it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plugins.vllm.tests.scene import ENVIRONMENT, State
from plugins.vllm.tests.twins import differing, each_rank, loaded, make_checkpoint
from weightwire.errors import UpdateRefused, WeightwireError
from weightwire.layout import ParamMeta
from weightwire.load_plan import LoadPlan
from weightwire.sink import UpdateSpec


def rounds(state: State, folder: Path, family: str, ranks: int) -> list[dict[str, Any]]:
    """On each rank two models, one updated by regions and one in full, twice; what became of them."""
    os.environ.update(ENVIRONMENT)
    checkpoints = [make_checkpoint(folder, family, seed=seed) for seed in (1, 2, 3)]
    return [_one_rank(vllm_config, checkpoints) for vllm_config in each_rank(folder, ranks)]


def _one_rank(vllm_config: Any, checkpoints: list[dict[str, Tensor]]) -> dict[str, Any]:
    *checkpoints, first = checkpoints
    models = [loaded(vllm_config, first) for _ in range(2)]
    by_regions, in_full = (_sink(model, vllm_config) for model in models)
    told: dict[str, Any] = {"differs": [], "moved": [], "allocated": [], "same plan": []}
    metadata = _metadata(checkpoints[0])
    plan = by_regions.load_plan(metadata)
    for tensors in checkpoints:
        before = {name: parameter.detach().clone() for name, parameter in models[0].named_parameters()}
        by_regions.begin(UpdateSpec(metadata))
        told["same plan"].append(by_regions.load_plan(metadata) is plan)
        _fill(plan, by_regions.landing(plan), tensors)
        by_regions.landed(plan)
        by_regions.prepare()
        told["allocated"].append(by_regions.commit().allocated_bytes)
        in_full.begin(UpdateSpec(metadata))
        in_full.load(tensors.items())
        in_full.prepare()
        in_full.commit()
        told["differs"] += differing(*models)
        told["moved"].append(sum(not torch.equal(before[name], one) for name, one in models[0].named_parameters()))
    nbytes = sum(tensor.nbytes for tensor in checkpoints[0].values())
    return {**told, "parameters": len(before), "in full": nbytes, "allocated in full": in_full.allocated_bytes}


def _sink(model: nn.Module, vllm_config: Any, **options: Any) -> Any:
    from weightwire_vllm.sink import VLLMSink

    return VLLMSink(model, vllm_config.model_config, vllm_config, device=torch.device("cpu"), **options)


def _metadata(tensors: dict[str, Tensor]) -> tuple[ParamMeta, ...]:
    return tuple(ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


def _fill(plan: LoadPlan, landing: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """What a transport does."""
    for flat in landing.values():
        flat.view(torch.uint8).fill_(0xA5)
    for copy in plan.copies:
        source = tensors[copy.source].reshape(-1)
        part, target = copy.source_region, copy.target_region
        landing[copy.target].as_strided(target.sizes, target.strides, target.offset).copy_(
            source.as_strided(part.sizes, part.strides, part.offset)
        )


def refusals(state: State, folder: Path) -> dict[str, str]:
    """What is said of plans that cannot be, by kind; nothing of it may reach the model."""
    os.environ.update(ENVIRONMENT)
    tensors = make_checkpoint(folder, "Llama")
    said: dict[str, str] = {}
    for vllm_config in each_rank(folder, 1):
        model = loaded(vllm_config, tensors)
        metadata = _metadata(tensors)
        changes = {
            "shape": {"model.norm.weight": (127,)},
            "name": {"model.nothing.weight": (3,)},
            "part of a layer": {"model.layers.1.self_attn.k_proj.weight": None},
        }
        for kind, change in changes.items():
            shapes: dict[str, Any] = {meta.name: meta.shape for meta in metadata} | change
            changed = [ParamMeta(name, torch.bfloat16, shape) for name, shape in shapes.items() if shape is not None]
            said[kind] = _refused(_sink(model, vllm_config), changed)
        float32 = [ParamMeta(meta.name, torch.float32, meta.shape) for meta in metadata]
        said["dtype"] = _refused(_sink(model, vllm_config), float32)
        said["none"] = _refused(_sink(model, vllm_config, staging="none"), metadata)
        said["cast"] = str([one.reason for one in _sink(model, vllm_config, cast=True).load_plan(float32).opaque][:1])
        sink = _sink(model, vllm_config)
        plan = sink.load_plan(metadata)
        sink.load_plan(metadata[:1])
        sink.begin(UpdateSpec(metadata))
        try:
            sink.landing(plan)
        except UpdateRefused as error:
            said["another plan"] = str(error)
    return said


def _refused(sink: Any, metadata: Any) -> str:
    try:
        sink.load_plan(metadata)
    except WeightwireError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"
