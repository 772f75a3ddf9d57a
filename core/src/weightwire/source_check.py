"""Whether a source yields what it declares: looked at before a byte of it moves."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from weightwire.dtensor import is_dtensor
from weightwire.errors import SourceMismatch
from weightwire.layout import ParamMeta

_DTYPE, _IS_META, _LAYOUT, _SHAPE = map(operator.attrgetter, ("dtype", "is_meta", "layout", "shape"))


def checked(
    pairs: Iterable[tuple[str, Tensor]], expected: Sequence[ParamMeta], *, local_rank: int | None = None
) -> Iterator[tuple[ParamMeta, Tensor]]:
    """Compare what a source yields with what it declared, item by item, before a byte of the item moves.

    Args:
        pairs: `iter_full()` or `iter_local()`.
        expected: What the metadata declares for this rank, in order.
        local_rank: The trainer rank whose pieces these are; None for whole tensors.

    Yields:
        The metadata and the tensor: detached, contiguous, conjugation and negation resolved.

    Raises:
        SourceMismatch: Another name, order, dtype, shape or number of tensors, or something that holds no
            bytes; names the first parameter that diverges and its index.
    """
    count = 0
    for index, (name, tensor) in enumerate(pairs):
        problem = _divergence(index, name, tensor, expected, local_rank)
        if problem:
            raise SourceMismatch(f"the source yields {name!r} at index {index}{problem}", parameter=name)
        count += 1
        yield expected[index], _plain(tensor.detach())
    if count < len(expected):
        missing = expected[count].name
        raise SourceMismatch(
            f"the source ends at index {count}, where its metadata declares {missing!r}: {count} of "
            f"{len(expected)} were yielded",
            parameter=missing,
        )


def _plain(tensor: Tensor) -> Tensor:
    # Asking is cheaper than calling what mostly has nothing to do, and there may be tens of thousands.
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _divergence(
    index: int, name: str, tensor: Tensor, expected: Sequence[ParamMeta], local_rank: int | None
) -> str | None:
    """What is wrong with item `index`, to end the sentence that names it; None if nothing is."""
    meta = expected[index] if index < len(expected) else None
    if meta is None or name != meta.name:
        again = " a second time" if any(name == earlier.name for earlier in expected[:index]) else ""
        where = f"where its metadata declares {meta.name!r}" if meta else "after all that its metadata declares"
        return f"{again}, {where}"
    if not isinstance(tensor, Tensor) or is_dtensor(tensor):
        return f" as a {type(tensor).__name__}, not a plain tensor"
    if tensor.layout is not torch.strided or tensor.is_meta:
        return f" as a {tensor.layout} tensor on {tensor.device}, which holds no bytes that could be sent"
    shape = meta.shape if local_rank is None else meta.local_shape(local_rank)
    if tensor.dtype != meta.dtype or tensor.shape != shape:
        return f" as {tensor.dtype} of shape {tuple(tensor.shape)}, and declares {meta.dtype} of shape {shape}"
    return None


def agree(names: list[str], tensors: list[Tensor], expected: Sequence[ParamMeta]) -> bool:
    """Whether these are `expected`, in order, each a plain contiguous tensor: `checked` would yield them as they are.

    False may mean no more than that one of them is not contiguous; `checked` tells.
    """
    # Passes that run in C and keep nothing: a loop over tens of thousands of tensors costs five times as much, and as
    # many new tuples would set the garbage collector off.
    return (
        names == [meta.name for meta in expected]
        and set(map(type, tensors)) <= {Tensor, nn.Parameter}
        and set(map(_LAYOUT, tensors)) <= {torch.strided}
        and not any(map(_IS_META, tensors))
        and all(map(operator.is_, map(_DTYPE, tensors), map(_DTYPE, expected)))
        and all(map(operator.eq, map(_SHAPE, tensors), map(_SHAPE, expected)))
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_conj, tensors))
        and not any(map(Tensor.is_neg, tensors))
    )
