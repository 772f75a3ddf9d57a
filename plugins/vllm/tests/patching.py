"""Patches of vLLM's own models, without a transport; module-level, so that a rank can run it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from core.tests.patch_scenes import assert_outcome, hold, random_patches
from plugins.vllm.tests.by_regions import fill, metadata_of, sink_of, update_by_regions, update_in_full
from plugins.vllm.tests.scene import ENVIRONMENT, State
from plugins.vllm.tests.twins import differing, each_rank, loaded, make_checkpoint
from weightwire import staging
from weightwire.errors import UpdateRefused
from weightwire.sink import Patch, UpdateSpec

QUERY = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def rounds(state: State, folder: Path, family: str, ranks: int) -> list[dict[str, Any]]:
    """On each rank a model that is patched after an update by regions."""
    os.environ.update(ENVIRONMENT)
    tensors = make_checkpoint(folder, family)
    with mock.patch.object(staging, "POISON", True):
        return [_one_rank(vllm_config, tensors) for vllm_config in each_rank(folder, ranks)]


def cast(state: State, folder: Path) -> list[dict[str, Any]]:
    """A model whose loader gets everything in full, since it casts."""
    os.environ.update(ENVIRONMENT)
    wide = {name: tensor.float() for name, tensor in make_checkpoint(folder, "Llama").items()}
    return [_one_rank(vllm_config, wide, cast=True) for vllm_config in each_rank(folder, 1)]


def _one_rank(vllm_config: Any, tensors: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    model, metadata = loaded(vllm_config, tensors), metadata_of(tensors)
    sink = sink_of(model, vllm_config, **options)
    told: dict[str, Any] = {"at first": sink.unpatchable(metadata), "differs": [], "patched": []}
    plan = sink.load_plan(metadata)
    update_by_regions(sink, plan, tensors)
    told["then"] = sink.unpatchable(metadata)
    for seed in (1, 2, 3):
        patches, new = random_patches(tensors, seed)
        for commits in (False, True):
            sink.begin(UpdateSpec(metadata))
            hold(sink, [patches], list(new))
            assert_outcome(sink, plan, new)
            sink.prepare()
            if commits:
                told["patched"].append(sink.commit().patched == len({patch.name for patch in patches}))
            else:
                sink.abort(retire=True)
                told["differs"] += differing(model, loaded(vllm_config, tensors))
        told["differs"] += differing(model, loaded(vllm_config, new))
        tensors = new
    update_by_regions(sink, plan, tensors)
    told["differs"] += differing(model, loaded(vllm_config, tensors))
    told["in the end"] = sink.unpatchable(metadata)
    return told


def no_base(state: State, folder: Path) -> dict[str, Any]:
    """After what an update cannot be patched, and what is said of it."""
    os.environ.update(ENVIRONMENT)
    tensors = make_checkpoint(folder, "Qwen2")
    metadata, told = metadata_of(tensors), {}
    for vllm_config in each_rank(folder, 1):
        model = loaded(vllm_config, tensors)
        sink, none = sink_of(model, vllm_config), sink_of(model, vllm_config, staging="none")
        told["nothing is staged"] = none.unpatchable(metadata)
        plan = sink.load_plan(metadata)

        def aborted(sink: Any = sink, plan: Any = plan) -> None:
            sink.begin(UpdateSpec(metadata))
            fill(plan, sink.landing(plan), tensors)
            sink.abort()

        ways = {
            "an aborted update": aborted,
            "an update in full": lambda sink=sink: update_in_full(sink, tensors),
            "a reset": sink.reset,
            "a failed reload": lambda sink=sink, model=model: _failed(sink, model, metadata),
        }
        for kind, way in ways.items():
            update_by_regions(sink, plan, tensors)
            assert sink.unpatchable(metadata) is None
            way()
            told[kind] = sink.unpatchable(metadata)
            told[f"{kind}, patched"] = _patched(sink, metadata, [])
        update_by_regions(sink, plan, tensors)
        told["other tensors"] = sink.unpatchable(metadata_of({NORM: torch.zeros(3, dtype=torch.bfloat16)}))
    return told


def _failed(sink: Any, model: Any, metadata: Any) -> None:
    """vLLM's loader raises half-way through the reload of what was patched."""

    def failing(pairs: Any) -> None:
        raise MemoryError("none left")

    sink.begin(UpdateSpec(metadata))
    sink.keep(meta.name for meta in metadata)
    sink.prepare()
    with mock.patch.object(model, "load_weights", failing):
        try:
            sink.commit()
        except MemoryError:
            sink.abort()


def _patched(sink: Any, metadata: Any, patches: list[Patch], scope: Any = "full") -> str | None:
    """An update that patches; what is said if it is refused."""
    try:
        sink.begin(UpdateSpec(metadata, scope))
        hold(sink, [patches], [meta.name for meta in metadata])
        sink.prepare()
        sink.commit()
    except UpdateRefused as refusal:
        sink.abort()
        return str(refusal)
    return None


def part_of_a_layer(state: State, folder: Path) -> dict[str, Any]:
    """Patches of one of the tensors that a layer is made of, and an update that brings only that tensor."""
    os.environ.update(ENVIRONMENT)
    tensors = make_checkpoint(folder, "Qwen2")
    told: dict[str, Any] = {}
    for vllm_config in each_rank(folder, 1):
        model = loaded(vllm_config, tensors)
        sink, metadata = sink_of(model, vllm_config), metadata_of({QUERY: tensors[QUERY]})
        update_by_regions(sink, sink.load_plan(metadata_of(tensors)), tensors)
        change = Patch(QUERY, torch.tensor([5, 900]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        tensors[QUERY].view(-1)[change.positions] = change.values
        told["patched"] = _patched(sink, metadata, [change], "partial")
        told["differs"] = differing(model, loaded(vllm_config, tensors))
        told["out of range"] = _patched(
            sink, metadata, [Patch(QUERY, torch.tensor([1 << 40]), change.values[:1])], "partial"
        )
        sink.begin(UpdateSpec(metadata, "partial"))
        try:
            sink.load([(QUERY, tensors[QUERY])])
        except UpdateRefused as refusal:
            told["brought"] = str(refusal)
        sink.abort()
        told["still"] = sink.unpatchable(metadata)
    return told
