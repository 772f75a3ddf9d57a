"""Chains of view operations, drawn at random: what is recorded on meta writes what torch writes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.tests.recording_models import check, each, module
from core.tests.sink_models import content
from weightwire.testing.strategies import dtypes

Step = Callable[[Tensor], Tensor]


def _narrow(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    start = draw(st.integers(0, shape[dim]))
    length = draw(st.integers(0, shape[dim] - start))
    return lambda x: x.narrow(dim, start, length)


def _slice(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    start, step = draw(st.integers(0, shape[dim])), draw(st.integers(1, 3))
    index = (*(slice(None) for _ in range(dim)), slice(start, None, step))
    return lambda x: x[index]


def _select(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    index = draw(st.integers(0, shape[dim] - 1)) if shape[dim] else None
    return (lambda x: x) if index is None else lambda x: x.select(dim, index)


def _split(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    size = draw(st.integers(1, max(shape[dim], 1)))
    return lambda x: x.split(size, dim)[-1]  # type: ignore[no-untyped-call]


def _chunk(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    count = draw(st.integers(1, 3))
    return lambda x: x.chunk(count, dim)[0]


def _unbind(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    return (lambda x: x.unbind(dim)[-1]) if shape[dim] else lambda x: x


def _unflatten(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    factors = [size for size in (2, 3) if shape[dim] and shape[dim] % size == 0]
    size = draw(st.sampled_from(factors)) if factors else 1
    return (lambda x: x.unflatten(dim, (size, -1))) if shape[dim] else lambda x: x  # type: ignore[no-untyped-call]


def _permute(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    order = draw(st.permutations(range(len(shape))))
    return lambda x: x.permute(order)


def _diagonal(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    return (lambda x: x.diagonal(0, 0, 1)) if len(shape) > 1 else lambda x: x


def _expand(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    count = draw(st.integers(1, 3))
    return lambda x: x.unsqueeze(dim).expand(*shape[:dim], count, *shape[dim:])


def _flatten(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    return lambda x: x.flatten(dim)


def _reshape(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    return lambda x: x.reshape(-1)


def _same(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    name = draw(st.sampled_from(("contiguous", "clone", "detach", "cpu", "squeeze", "ravel")))
    return lambda x: getattr(x, name)()


def _bytes(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Step:
    return lambda x: x.view(torch.uint8) if x.stride(-1) == 1 and x.dtype.itemsize == 1 else x


VIEWS = (_narrow, _slice, _select, _split, _chunk, _unbind, _unflatten, _permute, _diagonal, _expand, _bytes)
STEPS = (*VIEWS, _flatten, _reshape, _same)
TARGETS = (_narrow, _slice, _select, _split, _unflatten, _permute, _diagonal)


@st.composite
def chains(draw: st.DrawFn, shape: tuple[int, ...], kinds: tuple[Any, ...], most: int) -> list[Step]:
    """View operations that each suit what the ones before left."""
    tensor = torch.empty(shape, dtype=torch.uint8)
    steps: list[Step] = []
    for _ in range(draw(st.integers(0, most))):
        if tensor.dim() == 0 or tensor.dim() > 5:
            break
        dim = draw(st.integers(0, tensor.dim() - 1))
        step = draw(st.sampled_from(kinds))(draw, tuple(tensor.shape), dim)
        tensor = step(tensor)
        steps.append(step)
    return steps


def run(tensor: Tensor, steps: list[Step]) -> Tensor:
    for step in steps:
        tensor = step(tensor)
    return tensor


SHAPES = st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4).map(tuple)


@given(st.data(), SHAPES, dtypes())
def test_source_chains(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    steps = data.draw(chains(shape, STEPS, 6))
    tensors = {"w": content("w", torch.empty(shape, dtype=dtype), 1)}
    result = run(tensors["w"], steps)
    made = module(w=torch.zeros(result.shape, dtype=result.dtype))
    plan = check(made, each(lambda made, name, x: made.w.data.copy_(run(x, steps))), tensors)
    assert not plan.unfilled


@given(st.data(), SHAPES)
def test_views_alone_are_never_opaque(data: st.DataObject, shape: tuple[int, ...]) -> None:
    steps = data.draw(chains(shape, VIEWS, 6))
    tensors = {"w": content("w", torch.empty(shape), 1)}
    made = module(w=torch.zeros(run(tensors["w"], steps).shape))
    assert not check(made, each(lambda made, name, x: made.w.data.copy_(run(x, steps))), tensors).opaque


@given(st.data(), SHAPES)
def test_target_chains_that_overlap(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Several tensors into views of one parameter; copies that overlap are shadowed, or their module is opaque."""
    wholes = st.booleans()
    targets = [data.draw(chains(shape, TARGETS, 3)) for _ in range(data.draw(st.integers(1, 4)))]
    fills = [data.draw(wholes) for _ in targets]
    views = [run(torch.zeros(shape), steps) for steps in targets]
    tensors = {f"w{index}": content(f"w{index}", view, 1) for index, view in enumerate(views)}

    def load(made: Any, name: str, tensor: Tensor) -> None:
        index = int(name[1:])
        view = run(made.w.data, targets[index])
        if fills[index]:
            view.fill_(index + 0.5)
        else:
            view.copy_(tensor)

    plan = check(module(w=torch.full(shape, 7.0)), each(load), tensors)
    written = sum(copy.target_region.numel for copy in plan.copies)
    assert plan.opaque or written <= views[0].new_empty(shape).numel()
