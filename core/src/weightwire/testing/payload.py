"""What benchmarks move: parameter lists shaped like a model's, on touched pages, and their digest."""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightwire.source import as_bytes

_LAYER_TENSORS = 12
_OUTER_TENSORS = 2
_REFERENCE_BYTES = 988_065_536  # Qwen2-0.5B in bfloat16: hidden 896, intermediate 4864, vocabulary 151,936
_REFERENCE_HIDDEN = 896
_REFERENCE_INTERMEDIATE = 4864


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A list of parameters.

    Attributes:
        name: What it is, for reports.
        names: Parameter names, dotted as a module's are.
        shapes: Their shapes.
        dtype: Their dtype.
    """

    name: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes) * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """Name, number of tensors, bytes and dtype."""
        return {
            "name": self.name,
            "tensors": len(self.names),
            "bytes": self.nbytes,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def model_like(nbytes: int, *, tensors: int = 290) -> Payload:
    """A decoder in bfloat16 in the proportions of Qwen2-0.5B, which has 24 layers and 290 tensors.

    Args:
        nbytes: Size; the payload is at most one row of the embedding smaller (it cannot shrink below a few KiB).
        tensors: How many; each 12 make a layer, what is left over is norms.

    Raises:
        ValueError: Fewer than 14 tensors, which make no layer.
    """
    if tensors < _LAYER_TENSORS + _OUTER_TENSORS:
        raise ValueError(f"a model has at least 14 tensors, got {tensors}: use equal_tensors")
    layers, spare = divmod(tensors - _OUTER_TENSORS, _LAYER_TENSORS)
    scale = math.sqrt(nbytes / _REFERENCE_BYTES * 24 / layers)
    hidden = max(8, round(_REFERENCE_HIDDEN * scale / 8) * 8)
    body = _layers(layers, hidden, max(8, round(_REFERENCE_INTERMEDIATE * scale)))
    body += [(f"model.norms.{index}.weight", (hidden,)) for index in range(spare)]
    body.append(("model.norm.weight", (hidden,)))
    used = sum(math.prod(shape) for _, shape in body)
    rows = max(1, (nbytes // 2 - used) // hidden)
    names, shapes = zip(("model.embed_tokens.weight", (rows, hidden)), *body, strict=True)
    return Payload(name=f"{tensors} tensors of a Qwen2-like model", names=names, shapes=shapes)


def _layers(count: int, hidden: int, intermediate: int) -> list[tuple[str, tuple[int, ...]]]:
    keys = max(1, hidden // 7)
    layer: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("self_attn.q_proj.weight", (hidden, hidden)),
        ("self_attn.q_proj.bias", (hidden,)),
        ("self_attn.k_proj.weight", (keys, hidden)),
        ("self_attn.k_proj.bias", (keys,)),
        ("self_attn.v_proj.weight", (keys, hidden)),
        ("self_attn.v_proj.bias", (keys,)),
        ("self_attn.o_proj.weight", (hidden, hidden)),
        ("mlp.gate_proj.weight", (intermediate, hidden)),
        ("mlp.up_proj.weight", (intermediate, hidden)),
        ("mlp.down_proj.weight", (hidden, intermediate)),
        ("input_layernorm.weight", (hidden,)),
        ("post_attention_layernorm.weight", (hidden,)),
    )
    return [(f"model.layers.{index}.{name}", shape) for index in range(count) for name, shape in layer]


def equal_tensors(count: int, nbytes_each: int) -> Payload:
    """`count` vectors of `nbytes_each` bytes (made even) in bfloat16."""
    names = tuple(f"tensors.{index}" for index in range(count))
    shapes = ((max(1, nbytes_each // 2),),) * count
    return Payload(name=f"{count} tensors of {nbytes_each} bytes", names=names, shapes=shapes)


def build_module(payload: Payload, *, seed: int | None = None) -> nn.Module:
    """A module that has the payload's parameters, every page touched.

    Args:
        payload: The parameters.
        seed: Fills them with random bytes; None fills them with zeros.
    """
    root = nn.Module()
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for name, shape in zip(payload.names, payload.shapes, strict=True):
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        tensor = torch.zeros(shape, dtype=payload.dtype)
        if generator is not None:
            randomize(as_bytes(tensor), generator)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def randomize(data: torch.Tensor, generator: torch.Generator) -> None:
    """Fill `data`, 1-D uint8, with random bytes."""
    words = data.numel() // 8 * 8
    data[:words].view(torch.int64).random_(generator=generator)
    data[words:].random_(generator=generator)


def huge_buffer(nbytes: int) -> torch.Tensor:
    """`nbytes` zeros (1-D uint8) on huge pages where the system has them, every page touched."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 in hex over the bytes of `tensors` in order, as if they were one."""
    total = hashlib.sha256()
    for tensor in tensors:
        data = as_bytes(tensor)
        if data.numel():
            total.update((ctypes.c_char * data.numel()).from_address(data.data_ptr()))
    return total.hexdigest()
