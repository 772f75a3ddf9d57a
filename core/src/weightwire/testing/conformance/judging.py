"""What a model holds, compared byte for byte with what it should hold, and what that looks like where it differs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from weightwire.source import as_bytes
from weightwire.testing.conformance.payloads import Item, Payload, content

POISON = 0xA5
_SHOWN = 3


class Nonconforming(AssertionError):
    """A transport does not do what every transport has to do; the message says what, and where."""


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in contiguous order, as 1-D uint8."""
    return as_bytes(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    return one.dtype == other.dtype and torch.equal(bytes_of(one), bytes_of(other))


def judge(model: nn.Module, payload: Payload, version: int, previous: int) -> list[str]:
    """What is wrong with a model that should be in `version` and was in `previous`; a sentence per parameter."""
    found = dict(model.named_parameters(remove_duplicate=False))
    wanted = {item.name: content(item, version) for item in payload}
    complaints, count = [], 0
    for item in payload:
        # A transport that says too early that it is done may still be writing.
        snapshot = found[item.name].detach().clone()
        if not same(snapshot, wanted[item.name]):
            count += 1
            if count <= _SHOWN:
                complaints.append(_explained(item, snapshot, wanted, previous))
    if count > _SHOWN:
        complaints.append(f"and {count - _SHOWN} more parameters of {len(payload)}")
    return complaints


def _explained(item: Item, found: Tensor, wanted: Mapping[str, Tensor], previous: int) -> str:
    name, want = repr(item.name), wanted[item.name]
    if found.shape != want.shape or found.dtype != want.dtype:
        return f"{name} became {tuple(found.shape)} of {found.dtype}, it was sent as {item.shape} of {item.dtype}"
    data = bytes_of(found)
    if bool((data == POISON).all()):
        return f"{name} holds the poison that staging is filled with: its bytes never came"
    if same(found, content(item, previous)):
        return f"{name} holds its bytes of update {previous}: stale"
    others = [other for other, value in wanted.items() if other != item.name and same(found, value)]
    if others:
        return f"{name} holds the bytes of {others[0]!r}: swapped"
    for dtype, converted in _conversions(want):
        if same(found, converted):
            return f"{name} of {item.dtype} was converted to {dtype} on the way"
    differing = (data != bytes_of(want)).nonzero().reshape(-1)
    first, poisoned = int(differing[0]), int((data[differing] == POISON).sum())
    words = f"{len(differing)} of {data.numel()} bytes of {name} differ, first at byte {first}"
    return f"{words}: poison, which never was overwritten" if poisoned == len(differing) else words


def _conversions(value: Tensor) -> Iterator[tuple[torch.dtype, Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64):
            if dtype != value.dtype and not value.is_complex():
                yield dtype, value.to(dtype).to(value.dtype)


def mixture(model: nn.Module, payload: Payload, old: int, new: int) -> str:
    """`""` if every parameter is in version `old`, otherwise what is there instead."""
    found = dict(model.named_parameters(remove_duplicate=False))
    state = {item.name: _version(found[item.name], item, old, new) for item in payload}
    names = {kind: [name for name, one in state.items() if one == kind] for kind in ("old", "new", "other")}
    if not names["new"] and not names["other"]:
        return ""
    if not names["old"] and not names["other"]:
        return "it serves the new weights"
    parts = [f"{len(many)} {kind} (such as {many[0]!r})" for kind, many in names.items() if many]
    return f"its weights are torn: {', '.join(parts)}"


def _version(found: Tensor, item: Item, old: int, new: int) -> str:
    before = content(item, old)
    if same(found, before):
        return "old"
    return "new" if same(found, content(item, new)) else "other"
