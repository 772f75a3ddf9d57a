"""The weights that are sent: described by a few numbers, so that every process can make any version of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor, nn

from weightwire.layout import ParamMeta, dtype_name

Form = Literal["plain", "transposed", "strided", "offset", "expanded", "conjugated", "shared"]
"""How the trainer holds a tensor. `"shared"` ones lie in one storage, on both sides."""

DTYPES: Final = tuple(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
        *("float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16"),
        *("uint8", "bool", "complex128", "complex64", "complex32"),
    )
    if hasattr(torch, name)
)
"""Every dtype whose tensors are plain bytes."""


@dataclass(frozen=True, slots=True)
class Item:
    """One parameter.

    Attributes:
        name: Its name; may have dots.
        shape: Its shape.
        dtype: Its dtype.
        form: How the trainer holds it.
        tied_to: The earlier parameter that it is another name of. Sources send such a one once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    form: Form = "plain"
    tied_to: str | None = None


Payload = tuple[Item, ...]
"""A model, in the order in which its parameters travel."""


def content(item: Item, version: int) -> Tensor:
    """The contiguous value of `item` in `version`: random bytes, NaNs among them, that no other item or version has."""
    seed = zlib.crc32((item.tied_to or item.name).encode()) * 1009 + version
    generator = torch.Generator().manual_seed(seed)
    shape = (1, *item.shape[1:]) if item.form == "expanded" else item.shape
    size = torch.Size(shape).numel() * item.dtype.itemsize
    raw = torch.randint(0, 2 if item.dtype is torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(item.dtype).reshape(shape).expand(item.shape).contiguous()


def held(item: Item, version: int) -> Tensor:
    """The same value, as the trainer holds it."""
    value = content(item, version)
    if item.form == "transposed":
        back = tuple(reversed(range(value.ndim)))
        return value.permute(back).contiguous().permute(back)
    if item.form == "strided":
        return torch.stack((value, value), dim=-1)[..., 0]
    if item.form == "offset":
        return torch.cat((value.reshape(-1)[:1], value.reshape(-1)))[1:].reshape(item.shape)
    if item.form == "expanded":
        return value[:1].clone().expand(item.shape)
    if item.form == "conjugated":
        return torch.conj_physical(value).conj()
    return value


def trainer_tensors(payload: Payload, version: int) -> dict[str, Tensor]:
    """What a source iterates: tied parameters once, shared ones in one storage."""
    tensors = {item.name: held(item, version) for item in payload if item.tied_to is None}
    return tensors | _in_one_storage(payload, tensors)


def _in_one_storage(payload: Payload, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    shared = [item for item in payload if item.form == "shared"]
    if not shared:
        return {}
    flat = torch.cat([tensors[item.name].reshape(-1) for item in shared])
    cuts = torch.split(flat, [torch.Size(item.shape).numel() for item in shared])
    return {item.name: cut.view(item.shape) for item, cut in zip(shared, cuts, strict=True)}


def metadata(payload: Payload, owners: dict[str, tuple[int, ...]] | None = None) -> list[ParamMeta]:
    """What a source declares."""
    chosen = owners or {}
    sent = [item for item in payload if item.tied_to is None]
    return [ParamMeta(item.name, item.dtype, item.shape, owners=chosen.get(item.name)) for item in sent]


class Model(nn.Module):
    """A worker's model: the parameters of `payload` in `version`, in the reverse order of travel."""

    def __init__(self, payload: Payload, version: int) -> None:
        super().__init__()
        plain = tuple(item for item in payload if item.tied_to is None)
        values = {item.name: content(item, version) for item in plain}
        values |= _in_one_storage(payload, values)
        made = {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()}
        for item in reversed(payload):
            self._place(item.name, made[item.tied_to or item.name])

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        owner: nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, parameter)


def every_dtype() -> Payload:
    """Each dtype, in a shape of an odd number of elements; what takes one byte stands before what takes eight."""
    return tuple(Item(f"layer.of_{dtype_name(dtype)}", (5, 13), dtype) for dtype in sorted(DTYPES, key=_width))


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize


def narrow_before_wide() -> Payload:
    """Odd numbers of narrow elements, each before a wide one that would be misaligned right behind it."""
    pairs = ((torch.uint8, torch.float64), (torch.bool, torch.complex128), (torch.bfloat16, torch.int64))
    items = [
        item
        for place, (narrow, wide) in enumerate(pairs)
        for item in (Item(f"narrow_{place}", (2 * place + 3,), narrow), Item(f"wide_{place}", (7,), wide))
    ]
    return tuple(items)


def odd_views() -> Payload:
    """0-d, empty, non-contiguous, expanded, conjugated, in one storage, tied."""
    return (
        Item("scalar", ()),
        Item("empty", (0, 4)),
        Item("one", (1,), torch.bfloat16),
        Item("transposed", (6, 9), torch.bfloat16, "transposed"),
        Item("cube", (3, 4, 5), torch.float32, "transposed"),
        Item("strided", (4, 7), torch.int16, "strided"),
        Item("offset", (5, 3), torch.float8_e4m3fn, "offset"),
        Item("expanded", (4, 33), torch.float32, "expanded"),
        Item("conjugated", (3, 5), torch.complex64, "conjugated"),
        Item("shared_first", (8, 3), torch.float32, "shared"),
        Item("shared_second", (5,), torch.float32, "shared"),
        Item("embedding.weight", (16, 4), torch.bfloat16),
        Item("head.weight", (16, 4), torch.bfloat16, tied_to="embedding.weight"),
    )


def tiny(count: int) -> Payload:
    """Thousands of small parameters."""
    return tuple(Item(f"layers.{place // 10}.part_{place % 10}", (1 + place % 37,)) for place in range(count))


def larger_than(nbytes: int) -> Payload:
    """A parameter half as large again as `nbytes`, between two small ones."""
    return (Item("before", (3,)), Item("large", (3 * nbytes // 4 + 1,), torch.bfloat16), Item("after", (5,)))


def twins() -> Payload:
    """Parameters of one shape and dtype, which only their order tells apart, in no order of names, small and large."""
    small, large = (11, 3), (300, 1000)
    return tuple(
        item
        for few, many in (("q", "y"), ("b", "k"), ("z", "c"), ("m", ""), ("a", ""))
        for item in (Item(f"twin_{few}", small), *(Item(f"large_twin_{letter}", large) for letter in many))
    )


def blocks(count: int = 8, nbytes: int = 1 << 18) -> Payload:
    """Equal parameters in a row, and a small one."""
    return (*(Item(f"block_{place}", (nbytes // 2,), torch.bfloat16) for place in range(count)), Item("norm", (64,)))


def small() -> Payload:
    """A few kibibytes of everything."""
    return (
        Item("norm.weight", (33,), torch.bfloat16),
        Item("proj.weight", (24, 40)),
        Item("proj.bias", (24,)),
        Item("scale", (3,), torch.float8_e4m3fn),
        Item("steps", (), torch.int64),
        Item("mask", (65,), torch.bool),
    )
