"""Models that load themselves, and the same updates brought to two models in two ways: by regions, and plainly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.tests.recording_models import Pairs, assert_same_state
from core.tests.sink_models import content, metadata, push, spec_of
from weightwire.load_plan import LoadPlan
from weightwire.region import Region
from weightwire.sink import CommitReport, Scope, WeightSink


def part(flat: Tensor, region: Region) -> Tensor:
    return flat.as_strided(region.sizes, region.strides, flat.storage_offset() + region.offset)


def land(sink: WeightSink, plan: LoadPlan, tensors: Mapping[str, Tensor], late: Sequence[Tensor] = ()) -> None:
    """What a transport does with a plan between begin and prepare; meanwhile the bytes of an aborted one arrive."""
    landing = sink.landing(plan)
    for one in plan.copies:
        source = tensors[one.source].reshape(-1)
        part(landing[one.target].view(source.dtype), one.target_region).copy_(part(source, one.source_region))
    for memory in late:
        memory.view(torch.uint8).fill_(0xEE)
    del landing
    sink.landed(plan)


def push_by_regions(
    sink: WeightSink, tensors: Mapping[str, Tensor], scope: Scope = "full", late: Sequence[Tensor] = ()
) -> CommitReport:
    plan = sink.load_plan(metadata(tensors))
    assert LoadPlan.from_json(plan.to_json()) == plan
    sink.begin(spec_of(tensors, scope))
    assert sink.load_plan(metadata(tensors)) is plan
    land(sink, plan, tensors, late)
    sink.prepare()
    return sink.commit()


# Models that load by themselves


class Loading(nn.Module):
    """A model of several parts, each with a loader of its own; `checkpoint` is what they take."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.parts: Any = nn.ModuleList(globals()[kind]() for kind in kinds)

    def load_weights(self, pairs: Pairs) -> set[str]:
        found = set()
        for name, tensor in pairs:
            _, place, leaf = name.split(".", 2)
            self.parts[int(place)].take(leaf, tensor)
            found.add(name)
        return found

    def checkpoint(self, state: int) -> dict[str, Tensor]:
        tensors = {
            f"parts.{place}.{name}": like for place, one in enumerate(self.parts) for name, like in one.likes().items()
        }
        return {
            name: content(name, like, state) if like.dtype != torch.float32 else numbers(name, like, state)
            for name, like in tensors.items()
        }


def numbers(name: str, like: Tensor, state: int) -> Tensor:
    """Contents that casts and arithmetic keep apart."""
    bits = content(name, torch.empty(like.shape, dtype=torch.int64), state)
    return (bits % 1000).to(torch.float32) / 7


class Fused(nn.Module):
    """Query, key and value rows in one parameter, gate and up in another: this rank's halves of each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(4 + 2 + 2, 6))
        self.gate_up = nn.Parameter(torch.zeros(2, 5, 6, dtype=torch.bfloat16))

    def likes(self) -> dict[str, Tensor]:
        rows = {"q": torch.empty(8, 6), "k": torch.empty(4, 6), "v": torch.empty(4, 6)}
        return {**rows, **dict.fromkeys(("gate", "up"), torch.empty(10, 6, dtype=torch.bfloat16))}

    def take(self, leaf: str, tensor: Tensor) -> None:
        mine = tensor.chunk(2)[1]
        if leaf in ("gate", "up"):
            self.gate_up.data[int(leaf == "up")].copy_(mine)
        else:
            start, size = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}[leaf]
            self.qkv.data.narrow(0, start, size).copy_(mine)


class Experts(nn.Module):
    """Experts one by one into a stack, transposed, and once more as one stacked tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(3, 4, 5, dtype=torch.float16))
        self.w2 = nn.Parameter(torch.zeros(2, 5, 3))

    def likes(self) -> dict[str, Tensor]:
        return {**{f"e{k}": torch.empty(5, 4, dtype=torch.float16) for k in range(3)}, "all": torch.empty(4, 3, 5)}

    def take(self, leaf: str, tensor: Tensor) -> None:
        if leaf == "all":
            self.w2.data.copy_(tensor[2:].transpose(1, 2))
        else:
            self.w13.data[int(leaf[1:])].copy_(tensor.t())


class Vocabulary(nn.Module):
    """Padded rows that nobody writes, a constant, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.full((8, 4), 3.0, dtype=torch.bfloat16))
        self.head = self.embed
        self.filled = nn.Parameter(torch.ones(6))
        self.register_buffer("cache", torch.full((3,), 5.0), persistent=False)
        self.register_buffer("steps", torch.tensor(7))

    def likes(self) -> dict[str, Tensor]:
        return {"embed": torch.empty(5, 4, dtype=torch.bfloat16), "filled": torch.empty(4)}

    def take(self, leaf: str, tensor: Tensor) -> None:
        if leaf == "embed":
            self.embed.data[: len(tensor)].copy_(tensor)
        else:
            self.filled.data[len(tensor) :].zero_()
            self.filled.data[: len(tensor)] = tensor


class Odd(nn.Module):
    """A scalar, nothing at all, one element for many, a transposed parameter and two that share a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.spread = nn.Parameter(torch.zeros(3, 2, dtype=torch.int64), requires_grad=False)
        self.turned = nn.Parameter(torch.zeros(4, 3).t())
        flat = torch.zeros(9)
        self.first, self.second = nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[5:])

    def likes(self) -> dict[str, Tensor]:
        same = {name: torch.empty(getattr(self, name).shape) for name in ("scale", "nothing", "turned", "first")}
        return {**same, "spread": torch.empty(2, dtype=torch.int64), "second": torch.empty(4)}

    def take(self, leaf: str, tensor: Tensor) -> None:
        getattr(self, leaf).data.copy_(tensor.expand_as(getattr(self, leaf)))


class Cast(nn.Module):
    """Takes float32 into bfloat16: opaque."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
        self.plain = nn.Parameter(torch.zeros(3))

    def likes(self) -> dict[str, Tensor]:
        return {"weight": torch.empty(4, 4), "plain": torch.empty(3)}

    def take(self, leaf: str, tensor: Tensor) -> None:
        getattr(self, leaf).data.copy_(tensor)


class Arithmetic(nn.Module):
    """Adds one to what comes, and keeps a running sum of it: opaque."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.zeros(6))
        self.total = nn.Parameter(torch.zeros(6))

    def likes(self) -> dict[str, Tensor]:
        return {"norm": torch.empty(6)}

    def take(self, leaf: str, tensor: Tensor) -> None:
        self.norm.data.copy_(tensor + 1)
        self.total.data.add_(tensor)


LOADERS = ("Fused", "Experts", "Vocabulary", "Odd", "Cast", "Arithmetic")
OPAQUE = {"Cast", "Arithmetic"}


class Runner:
    """Loads, and is no module."""

    def __init__(self, model: Loading) -> None:
        self.model = model

    def load_weights(self, pairs: Pairs) -> None:
        self.model.load_weights(pairs)


# One history, by regions and by plain loading

STEPS = ("full", "partial", "abort", "late_abort", "retire", "mutate")


class Both:
    """A model that is updated by regions and one that is updated by `load`."""

    def __init__(self, build: Any, checkpoint: Any, sink: Any, **options: Any) -> None:
        self.checkpoint = checkpoint
        self.models = [build(), build()]
        self.sinks = [sink(model, **options) for model in self.models]
        self.by_regions, self.plain = self.sinks
        self.keeps_addresses = options.get("staging") == "in_place" and options.get("commit") == "copy"
        self.late: list[Tensor] = []

    def check(self) -> None:
        one, other = (model.model if isinstance(model, Runner) else model for model in self.models)
        assert_same_state(one, other)

    def step(self, action: str, state: int) -> None:
        getattr(self, action)(state)
        assert self.by_regions.torn == self.plain.torn
        if not self.by_regions.torn:
            self.check()

    def full(self, state: int) -> None:
        tensors = self.checkpoint(self.models[0], state)
        report = push_by_regions(self.by_regions, tensors, late=self.late)
        push(self.plain, tensors)
        assert report.swapped + report.copied + report.in_place > 0 or not tensors
        for memory in self.late:
            memory.view(torch.uint8).fill_(0xEE)
        assert not self.by_regions.torn

    def partial(self, state: int) -> None:
        if not self.by_regions.torn:
            tensors = self.checkpoint(self.models[0], state)
            some = {name: one for place, (name, one) in enumerate(tensors.items()) if (state >> place % 3) & 1}
            push_by_regions(self.by_regions, some, "partial")
            push(self.plain, some, "partial")

    def _abort(self, state: int, *, retire: bool, half: bool) -> None:
        tensors = self.checkpoint(self.models[0], state)
        plan = self.by_regions.load_plan(metadata(tensors))
        for sink in self.sinks:
            sink.begin(spec_of(tensors))
        if half:
            given = self.half_landed(plan)
            self.late += given if retire and not self.keeps_addresses else ()
        else:
            land(self.by_regions, plan, tensors)
            self.by_regions.prepare()
        if self.by_regions.dirty:
            self.plain.load(tensors.items())
        for sink in self.sinks:
            sink.abort(retire=retire)

    def half_landed(self, plan: LoadPlan) -> list[Tensor]:
        """What a transfer that breaks off was given, and has written to."""
        given = list(self.by_regions.landing(plan).values())
        if self.by_regions.staging == "staged":
            for memory in given:
                memory.view(torch.uint8).fill_(0x5A)
        return given

    def abort(self, state: int) -> None:
        self._abort(state, retire=False, half=True)

    def late_abort(self, state: int) -> None:
        self._abort(state, retire=False, half=False)

    def retire(self, state: int) -> None:
        self._abort(state, retire=True, half=True)

    def mutate(self, state: int) -> None:
        """Whoever owns the model changes what it holds."""
        if self.by_regions.torn:
            return
        with torch.no_grad():
            for model in self.models:
                inner = model.model if isinstance(model, Runner) else model
                for name, tensor in (*inner.named_parameters(), *inner.named_buffers()):
                    tensor.data.copy_(content(name, tensor, state))
