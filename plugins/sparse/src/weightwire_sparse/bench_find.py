"""What one rank of the benchmark does by itself: finding what changed, beside copying the same memory and training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from weightwire.source import ModuleSource
from weightwire.testing.payload import Payload, build_module
from weightwire_sparse.bench_ways import change
from weightwire_sparse.finding import KernelChoice
from weightwire_sparse.memory import new_memory
from weightwire_sparse.tracker import DeltaTracker

State = dict[str, Any]
_SHARE: Final = 0.01
_LEARNING_RATE: Final = 1e-6


def sit(state: State, payload: Payload, kernels: Sequence[KernelChoice]) -> None:
    """Make the model, a tracker for each kernel, and memory to copy from and into."""
    torch.set_num_threads(1)
    state["model"] = model = build_module(payload, seed=0)
    state["trackers"] = trackers = {one: DeltaTracker(ModuleSource(model), kernels=one) for one in kernels}
    for tracker in trackers.values():
        tracker.take()
    state["from"], state["into"] = (new_memory(payload.nbytes) for _ in range(2))
    state["from"].fill(1)
    state["into"].fill(2)
    state["random"] = np.random.default_rng(0)


def step(state: State, way: str) -> tuple[float, int]:
    """Seconds of one way, and how many elements it found: `"memcpy"`, `"copy"` of the model's tensors, or a kernel."""
    model, tracker = state["model"], state["trackers"].get(way)
    if tracker is not None:
        tracker.find()  # what the other one's turn has changed
        for parameter in model.parameters():
            change(parameter.data, "random", _SHARE, state["random"])
        tracker._settle()  # as between rounds
    began = time.perf_counter()
    if way == "memcpy":
        np.copyto(state["into"], state["from"])
    elif way == "copy":
        _copy(model, state["into"])
    else:
        mark = tracker.find()
    seconds = time.perf_counter() - began
    found = tracker.since(mark - 1) if tracker is not None else None
    return seconds, 0 if found is None else len(found.addresses)


def _copy(model: nn.Module, into: Any) -> None:
    end = 0
    for parameter in model.parameters():
        content = parameter.data.view(-1).view(torch.uint8).numpy()
        np.copyto(into[end : end + len(content)], content)
        end += len(content)


def sit_and_train(state: State, payload: Payload) -> None:
    """Make the model, its gradients and an optimiser for each parameter."""
    torch.set_num_threads(1)
    state["model"] = model = build_module(payload, seed=None)
    state["optimisers"] = {}
    random = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.02, generator=random)
        parameter.requires_grad_(True)
        parameter.grad = torch.empty_like(parameter).normal_(0, 1, generator=random)
        state["optimisers"][name] = torch.optim.AdamW([parameter], lr=_LEARNING_RATE, weight_decay=0.0, foreach=False)
    state["tracker"] = tracker = DeltaTracker(ModuleSource(model))
    tracker.take()


def train(state: State, ahead: bool) -> dict[str, float]:
    """One optimiser step and a find, the find begun as soon as each parameter is done, or after all of them."""
    tracker = state["tracker"]
    tracker._settle()
    began = time.perf_counter()
    for name, optimiser in state["optimisers"].items():
        optimiser.step()
        if ahead:
            tracker.look([name])
    stepped = time.perf_counter()
    mark = tracker.find()
    ended = time.perf_counter()
    found = tracker.since(mark - 1)
    assert found is not None
    return {
        "seconds": ended - began,
        "optimiser_seconds": stepped - began,
        "find_seconds": ended - stepped,
        "changed": len(found.addresses) / tracker.space.numel,
    }
