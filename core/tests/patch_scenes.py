"""The same changes brought to two models: patched into one, and the other loads the patched checkpoint."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core.tests.recording_models import assert_same_state
from core.tests.region_models import part, push_by_regions
from core.tests.sink_models import content, metadata, push, same_bits, spec_of
from weightwire.errors import UpdateRefused
from weightwire.layout import Box
from weightwire.load_plan import LoadPlan
from weightwire.patching import ReadyPatch
from weightwire.sink import CommitReport, Patch, WeightSink

Tensors = dict[str, Tensor]


def bits_of(tensor: Tensor) -> Tensor:
    """A tensor as rows of bytes, one for each element."""
    return tensor.reshape(-1).contiguous().view(torch.uint8).reshape(tensor.numel(), tensor.dtype.itemsize)


def boxes_of(shape: Sequence[int], draw: random.Random) -> list[Box | None]:
    """A partition of a tensor, as shards and tensor-parallel parts are; sometimes one that is just the whole."""
    start, stop = [0] * len(shape), list(shape)
    if not shape or draw.random() < 0.3:
        return draw.choice([[None], [Box(tuple(start), tuple(stop))]])
    parts: list[Box | None] = []
    dim = draw.randrange(len(shape))
    cuts = sorted({0, shape[dim], *(draw.randint(0, shape[dim]) for _ in range(2))})
    for low, high in itertools.pairwise(cuts):
        start[dim], stop[dim] = low, high
        parts.append(Box(tuple(start), tuple(stop)))
    draw.shuffle(parts)
    return parts


def change(name: str, old: Tensor, box: Box | None, draw: random.Random, new: Tensor) -> Patch:
    """A patch of some elements of a box, or of all of them; `new`, which is contiguous, gets it too."""
    piece = new if box is None else new[box.slices()]
    fresh = content(name, old, draw.randint(1, 1 << 20))
    values = (fresh if box is None else fresh[box.slices()]).reshape(-1)
    if draw.random() < 0.3:
        piece.copy_(values.view(piece.shape))
        return Patch(name, None, values, box)
    count = draw.choice((0, 1, values.numel() // 3, values.numel()))
    positions = torch.tensor(draw.sample(range(values.numel()), min(count, values.numel())), dtype=torch.int64)
    if draw.random() < 0.7:
        positions = positions.sort().values
    changed = piece.reshape(-1).clone()
    bits_of(changed)[positions] = bits_of(values)[positions]
    piece.copy_(changed.view(piece.shape))
    width = draw.choice((torch.int32, torch.int64))
    return Patch(name, positions.to(width), bits_of(values)[positions].reshape(-1).view(values.dtype), box)


def random_patches(tensors: Mapping[str, Tensor], seed: int) -> tuple[list[Patch], Tensors]:
    """Patches of some tensors, each in disjoint boxes, and what the tensors are with them."""
    draw = random.Random(seed)
    patches, result = [], {name: one.clone(memory_format=torch.contiguous_format) for name, one in tensors.items()}
    for name, new in result.items():
        if draw.random() < 0.6:
            patches += [change(name, new, box, draw, new) for box in boxes_of(new.shape, draw)]
    draw.shuffle(patches)
    return patches, result


def hold(sink: WeightSink, calls: Sequence[Sequence[Patch]], names: Sequence[str]) -> None:
    """What a transport does between begin and prepare."""
    for patches in calls:
        sink.patch(patches)
    touched = {patch.name for patches in calls for patch in patches}
    sink.keep([name for name in names if name not in touched])


def hold_and_prepare(sink: WeightSink, patches: Sequence[Patch], names: Sequence[str]) -> None:
    """All of an update but its begin and its end."""
    hold(sink, [patches], names)
    sink.prepare()


def patched(sink: WeightSink, patches: Sequence[Patch], tensors: Mapping[str, Tensor]) -> CommitReport:
    """A whole update that patches; `tensors` has the metadata."""
    sink.begin(spec_of(tensors))
    hold_and_prepare(sink, patches, list(tensors))
    return sink.commit()


def assert_outcome(sink: WeightSink, plan: LoadPlan, tensors: Mapping[str, Tensor]) -> None:
    """What would be in the targets is what the tensors have."""
    found = dict(sink.outcome(plan))
    for copy in plan.copies:
        here = part(found[copy.target].view(tensors[copy.source].dtype), copy.target_region)
        assert same_bits(here, part(tensors[copy.source].reshape(-1), copy.source_region)), copy


class Twice:
    """A model that is patched, and one that loads; they are the same after every step."""

    def __init__(
        self,
        build: Callable[[], Any],
        checkpoint: Callable[[Any, int], Tensors],
        sink: Callable[..., WeightSink],
        **options: Any,
    ) -> None:
        self.models = [build(), build()]
        self.patched, self.plain = (sink(model, **options) for model in self.models)
        self.checkpoint = checkpoint
        self.full(1)

    def step(self, action: str, seed: int) -> None:
        getattr(self, action)(seed)
        assert_same_state(*self.models)

    def full(self, seed: int) -> None:
        self.tensors = self.checkpoint(self.models[0], seed)
        if seed % 2:
            push_by_regions(self.patched, self.tensors)
        else:
            push(self.patched, self.tensors)
        push(self.plain, self.tensors)

    def partial(self, seed: int) -> None:
        tensors = self.checkpoint(self.models[0], seed)
        some = {name: one for place, (name, one) in enumerate(tensors.items()) if (seed >> place % 3) & 1}
        for sink in (self.patched, self.plain):
            push(sink, some, "partial")
        self.tensors |= some

    def held(self, seed: int) -> Tensors:
        """An update is open with all its patches; what it would leave has been looked at, and nothing is changed."""
        first, new = random_patches(self.tensors, seed)
        later, newer = random_patches(new, seed + 1) if seed % 3 == 0 else ([], new)
        assert self.patched.unpatchable(metadata(self.tensors)) is None
        plan = self.patched.load_plan(metadata(self.tensors))
        self.patched.begin(spec_of(self.tensors))
        touched = {patch.name for patch in first}
        hold(self.patched, [first, [patch for patch in later if patch.name in touched]], list(self.tensors))
        for patch in later:
            if patch.name not in touched:
                newer[patch.name] = self.tensors[patch.name]
        assert_outcome(self.patched, plan, newer)
        return newer

    def patch(self, seed: int) -> None:
        new = self.held(seed)
        self.patched.prepare()
        assert_same_state(*self.models)
        self.patched.commit()
        push(self.plain, new)
        self.tensors = new

    def abort(self, seed: int) -> None:
        self.held(seed)
        if seed % 2:
            self.patched.prepare()
        self.patched.abort(retire=bool(seed & 4))

    def broken(self, seed: int) -> None:
        """An error in the middle of commit; or it succeeds where nothing has to be written."""
        new = self.held(seed)
        self.patched.prepare()
        counts, apply, places = iter(range(1 << 20)), ReadyPatch.apply, seed % 4

        def breaking(patch: ReadyPatch) -> None:
            apply(patch)
            if next(counts) == places:
                raise KeyboardInterrupt

        try:
            with mock.patch.object(ReadyPatch, "apply", breaking):
                self.patched.commit()
        except KeyboardInterrupt:
            assert not self.patched.torn
            self.patched.abort()
        else:
            push(self.plain, new)
            self.tensors = new

    def retire(self, seed: int) -> None:
        """A transfer of everything breaks off, with bytes under way that must never count."""
        plan = self.patched.load_plan(metadata(self.tensors))
        self.patched.begin(spec_of(self.tensors))
        given = list(self.patched.landing(plan).values())
        self.patched.abort(retire=True)
        for memory in given:
            memory.view(torch.uint8).fill_(0xEE)

    def refused(self, seed: int) -> None:
        """One patch is spoiled: nothing is written."""
        patches, _ = random_patches(self.tensors, seed)
        spoiled = [spoil(patch, self.tensors[patch.name].shape, seed) for patch in patches[:1]]
        if not spoiled:
            return
        self.patched.begin(spec_of(self.tensors))
        with pytest.raises(UpdateRefused) as caught:
            hold_and_prepare(self.patched, [*patches[1:], *spoiled], list(self.tensors))
        assert caught.value.parameter == spoiled[0].name
        self.patched.abort()


def spoil(patch: Patch, shape: Sequence[int], seed: int) -> Patch:
    """A patch that cannot be right."""
    name, box, values = patch.name, patch.box, patch.values
    numel = box.numel if box is not None else torch.Size(shape).numel()
    one = torch.zeros(1, dtype=values.dtype)
    two = torch.zeros(2, dtype=values.dtype)
    wrong = [
        Patch(name, torch.tensor([numel]), one, box),
        Patch(name, torch.tensor([-1]), one, box),
        Patch(name, torch.tensor([0, 0]), two, box),
        Patch(name, torch.tensor([0.0]), one, box),
        Patch(name, torch.tensor([[0]]), one[None], box),
        Patch(name, torch.tensor([0, 1]), one, box),
        Patch(name, torch.arange(values.numel() + 1), values, box),
        Patch(name, None, torch.zeros(numel + 1, dtype=values.dtype), box),
        Patch(name, None, torch.zeros(numel, dtype=torch.int16), box),
        Patch(name, None, one, Box((0,) * len(shape), (*shape[:-1], shape[-1] + 1)) if shape else Box((0,), (1,))),
        Patch(name, None, one, Box((0,) * (len(shape) + 1), (1,) * (len(shape) + 1))),
    ]
    return wrong[seed % len(wrong)]


class Touched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that torch reads or writes, views aside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = list(_tensors(args))
        storages = {one.untyped_storage()._cdata for one in given}
        made = list(_tensors([result]))
        if func._schema.is_mutable:
            self.count += max((one.numel() for one in given[1:]), default=given[0].numel())
        elif any(one.untyped_storage()._cdata not in storages for one in made):
            self.count += sum(one.numel() for one in made)
            self.count += given[0].numel() if func in _REDUCTIONS else 0
        return result


_REDUCTIONS = (torch.ops.aten.all.default, torch.ops.aten.any.default, torch.ops.aten.sum.default)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def sums(model: nn.Module) -> dict[str, bytes]:
    """The bytes of every parameter and buffer."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: bytes(bits_of(one.detach()).reshape(-1).tolist()) for name, one in named}
