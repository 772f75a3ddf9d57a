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
    """On each rank a model that is updated by regions, one in full, and one that starts with the new weights."""
    os.environ.update(ENVIRONMENT)
    checkpoints = [make_checkpoint(folder, family, seed=seed) for seed in (1, 2, 3)]
    return [_one_rank(vllm_config, checkpoints) for vllm_config in each_rank(folder, ranks)]


def _one_rank(vllm_config: Any, checkpoints: list[dict[str, Tensor]]) -> dict[str, Any]:
    models = [loaded(vllm_config, checkpoints[0]) for _ in range(2)]
    by_regions, in_full = (sink_of(model, vllm_config) for model in models)
    metadata = metadata_of(checkpoints[0])
    plan = by_regions.load_plan(metadata)
    told: dict[str, Any] = {
        "allocated": [],
        "differs": [],
        "unmoved": list(plan.unmoved),
        "pieces": sum(target.size * target.dtype.itemsize for target in plan.targets),
        "in full": sum(tensor.nbytes for tensor in checkpoints[0].values()),
    }
    for tensors in (checkpoints[1], checkpoints[2]):
        told["allocated"].append(update_by_regions(by_regions, plan, tensors))
        update_in_full(in_full, tensors)
        told["differs"] += differing(*models) + differing(models[0], loaded(vllm_config, tensors))
    by_regions.begin(UpdateSpec(metadata))
    by_regions.landing(plan)
    by_regions.abort(retire=True)
    told["differs"] += differing(*models)
    for tensors in (checkpoints[1], checkpoints[0]):
        told["allocated"].append(update_by_regions(by_regions, plan, tensors))
    told["allocated"].append(update_in_full(by_regions, checkpoints[1]))
    update_in_full(in_full, checkpoints[1])
    told["differs"] += differing(*models)
    changed = differing(models[0], loaded(vllm_config, checkpoints[0]))
    told["as before"] = [name for name, _ in models[0].named_parameters() if name not in changed]
    return told


def update_by_regions(sink: Any, plan: LoadPlan, tensors: dict[str, Tensor]) -> int:
    metadata = metadata_of(tensors)
    sink.begin(UpdateSpec(metadata))
    assert sink.load_plan(metadata) is plan
    fill(plan, sink.landing(plan), tensors)
    sink.landed(plan)
    sink.prepare()
    return int(sink.commit().allocated_bytes)


def update_in_full(sink: Any, tensors: dict[str, Tensor]) -> int:
    sink.begin(UpdateSpec(metadata_of(tensors)))
    sink.load(tensors.items())
    sink.prepare()
    return int(sink.commit().allocated_bytes)


def sink_of(model: nn.Module, vllm_config: Any, **options: Any) -> Any:
    from weightwire_vllm.sink import VLLMSink

    return VLLMSink(model, vllm_config.model_config, vllm_config, device=torch.device("cpu"), **options)


def metadata_of(tensors: dict[str, Tensor]) -> tuple[ParamMeta, ...]:
    return tuple(ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


def fill(plan: LoadPlan, landing: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """What a transport does."""
    for flat in landing.values():
        flat.view(torch.uint8).fill_(0xA5)
    for copy in plan.copies:
        source = tensors[copy.source].reshape(-1)
        part, target = copy.source_region, copy.target_region
        landing[copy.target].as_strided(target.sizes, target.strides, target.offset).copy_(
            source.as_strided(part.sizes, part.strides, part.offset)
        )


def in_full_after_all(state: State, folder: Path) -> dict[str, Any]:
    """Updates by regions that bring everything whole: another dtype, and a model that has no twin."""
    os.environ.update(ENVIRONMENT)
    old, new = (make_checkpoint(folder, "Llama", seed=seed) for seed in (1, 2))
    wide = {name: tensor.float() for name, tensor in new.items()}
    told: dict[str, Any] = {}
    for vllm_config in each_rank(folder, 1):
        plain = loaded(vllm_config, new)
        for kind, tensors, options in (("cast", wide, {"cast": True}), ("no twin", new, {})):
            model = loaded(vllm_config, old)
            sink = sink_of(model, vllm_config, **options)
            sink.unchecked = "it has none" if kind == "no twin" else None
            plan = sink.load_plan(metadata_of(tensors))
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            told[kind] = {"more": update_by_regions(sink, plan, tensors) - nbytes}
            told[kind]["differs"] = differing(model, plain)
    return told


def without_experts(state: State, folder: Path) -> dict[str, Any]:
    """Updates that leave the experts alone, one that commits and one that is dropped half-way: what is lost."""
    os.environ.update(ENVIRONMENT)
    old, new = (make_checkpoint(folder, "Qwen3Moe", seed=seed) for seed in (1, 2))
    norm = {name: new[name] for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight")}
    told: dict[str, Any] = {}
    for vllm_config in each_rank(folder, 1):
        for kind, options in (("committed", {}), ("dropped", {"staging": "none"})):
            model, fresh = (loaded(vllm_config, old) for _ in range(2))
            sink = sink_of(model, vllm_config, **options)
            sink.begin(UpdateSpec(metadata_of(norm), scope="partial"))
            sink.load(norm.items())
            sink.prepare()
            sink.commit() if kind == "committed" else sink.abort()
            kernels = [getattr(one, "moe_kernel", one) for one in model.modules()]
            told[kind] = {"differs": differing(model, fresh), "without a kernel": kernels.count(None)}
    return told


def refusals(state: State, folder: Path) -> dict[str, str]:
    """What is said of plans that cannot be, by kind; nothing of it may reach the model."""
    os.environ.update(ENVIRONMENT)
    tensors = make_checkpoint(folder, "Llama")
    said: dict[str, str] = {}
    for vllm_config in each_rank(folder, 1):
        model, metadata = loaded(vllm_config, tensors), metadata_of(tensors)
        changes: dict[str, dict[str, Any]] = {
            "shape": {"model.norm.weight": (127,)},
            "name": {"model.nothing.weight": (3,)},
            "part of a layer": {"model.layers.1.self_attn.k_proj.weight": None},
        }
        for kind, change in changes.items():
            shapes: dict[str, Any] = {meta.name: meta.shape for meta in metadata} | change
            changed = [ParamMeta(name, torch.bfloat16, shape) for name, shape in shapes.items() if shape is not None]
            said[kind] = _refused(sink_of(model, vllm_config), changed)
        float32 = [ParamMeta(meta.name, torch.float32, meta.shape) for meta in metadata]
        said["dtype"] = _refused(sink_of(model, vllm_config), float32)
        said["none"] = _refused(sink_of(model, vllm_config, staging="none"), metadata)
        sink = sink_of(model, vllm_config)
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
