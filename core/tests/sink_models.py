"""Models with every kind of tensor a sink meets, and known contents for them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping

import torch
from torch import nn

from weightwire.layout import ParamMeta
from weightwire.sink import CommitReport, Scope, UpdateSpec, WeightSink

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)


class Part(nn.Module):
    """A place for parameters and buffers."""


class Zoo(nn.Module):
    """One part for every kind in `kinds`; `like` gives dtype and seed of each."""

    def __init__(self, kinds: list[str], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for kind in kinds:
            part = Part()
            getattr(self, f"make_{kind}")(part, dtype)
            self.parts.append(part)

    def make_plain(self, part: Part, dtype: torch.dtype) -> None:
        part.weight = parameter(torch.zeros(3, 4, dtype=dtype))

    def make_scalar(self, part: Part, dtype: torch.dtype) -> None:
        part.scale = parameter(torch.zeros((), dtype=dtype))

    def make_empty(self, part: Part, dtype: torch.dtype) -> None:
        part.nothing = parameter(torch.zeros(0, 3, dtype=dtype))

    def make_transposed(self, part: Part, dtype: torch.dtype) -> None:
        part.turned = parameter(torch.zeros(4, 3, dtype=dtype).t())

    def make_gapped(self, part: Part, dtype: torch.dtype) -> None:
        part.columns = parameter(torch.zeros(3, 8, dtype=dtype)[:, ::2])

    def make_slice(self, part: Part, dtype: torch.dtype) -> None:
        part.middle = parameter(torch.zeros(10, dtype=dtype)[3:7])

    def make_flat(self, part: Part, dtype: torch.dtype) -> None:
        flat = torch.zeros(20, dtype=dtype)
        part.first = parameter(flat[:6].view(2, 3))
        part.second = parameter(flat[8:12])
        part.register_buffer("third", flat[12:18].detach())
        part.register_buffer("hidden", flat[18:].detach(), persistent=False)

    def make_tied(self, part: Part, dtype: torch.dtype) -> None:
        part.one = parameter(torch.zeros(4, 2, dtype=dtype))
        part.other = part.one

    def make_alias(self, part: Part, dtype: torch.dtype) -> None:
        part.one = parameter(torch.zeros(5, dtype=dtype))
        part.same = parameter(part.one.data)

    def make_buffers(self, part: Part, dtype: torch.dtype) -> None:
        part.register_buffer("mean", torch.zeros(3, dtype=dtype))
        part.register_buffer("count", torch.zeros((), dtype=torch.int64))
        part.register_buffer("scratch", torch.ones(2), persistent=False)
        part.register_buffer("absent", None)
        part.register_parameter("none", None)


KINDS = sorted(name.removeprefix("make_") for name in vars(Zoo) if name.startswith("make_"))


def parameter(data: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)


def content(name: str, meta: torch.Tensor, state: int) -> torch.Tensor:
    """What `name` holds in the known state `state`: random bits, NaNs among them; state 0 is zeros."""
    if state == 0:
        return torch.zeros(meta.shape, dtype=meta.dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{state}".encode()))
    shape = (*meta.shape, meta.element_size())
    bits = torch.randint(0, 2 if meta.dtype is torch.bool else 256, shape, dtype=torch.uint8, generator=generator)
    return bits.view(meta.dtype).reshape(meta.shape)


def targets_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything an update may bring: parameters and persistent buffers, tied ones under their first name."""
    found: dict[str, torch.Tensor] = {}
    places = set()
    for name, tensor in {**dict(model.named_parameters()), **model.state_dict(keep_vars=True)}.items():
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape)
        if place not in places or not tensor.numel():
            places.add(place)
            found[name] = tensor
    return found


def metadata(tensors: Mapping[str, torch.Tensor]) -> tuple[ParamMeta, ...]:
    return tuple(ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


def spec_of(tensors: Mapping[str, torch.Tensor], scope: Scope = "full") -> UpdateSpec:
    return UpdateSpec(metadata(tensors), scope)


def push(sink: WeightSink, tensors: Mapping[str, torch.Tensor], scope: Scope = "full") -> CommitReport:
    """A whole update by `load`."""
    sink.begin(spec_of(tensors, scope))
    sink.load(tensors.items())
    sink.prepare()
    return sink.commit()


def bring(sink: WeightSink, tensors: Mapping[str, torch.Tensor], seed: int) -> None:
    """Bring every tensor by a way drawn at random."""
    draw = random.Random(seed)
    for name, tensor in tensors.items():
        way = draw.choice(("load", "targets", "adopt"))
        if way == "load":
            sink.load([(name, tensor)])
        elif way == "adopt":
            sink.adopt({name: tensor.clone()})
        else:
            for target in sink.targets([name]).values():
                assert target.is_contiguous()
                target.copy_(tensor)
            sink.received([name])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality bit for bit, of NaNs too."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    a, b = (tensor.data.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(a, b)
