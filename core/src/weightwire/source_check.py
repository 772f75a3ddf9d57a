"""Whether a source yields what it declares: looked at before a byte of it moves."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from weightwire.dtensor import is_dtensor
from weightwire.errors import SourceMismatch
from weightwire.layout import ParamMeta

_BLOCK = 1024
_DTYPE, _SHAPE = map(operator.attrgetter, ("dtype", "shape"))


def checked(
    pairs: Iterable[tuple[str, Tensor]],
    expected: Sequence[ParamMeta],
    *,
    local_rank: int | None = None,
    plain: bool = True,
) -> Iterator[tuple[ParamMeta, Tensor]]:
    """Compare what a source yields with what it declared, item by item, before a byte of the item moves.

    Args:
        pairs: `iter_full()` or `iter_local()`.
        expected: What the metadata declares for this rank, in order.
        local_rank: The trainer rank whose pieces these are; None for whole tensors.
        plain: False leaves strides, conjugation and negation as they are.

    Yields:
        The metadata and the tensor: detached, and if it is to be plain contiguous, conjugation and negation resolved.

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
        yield expected[index], as_plain(tensor.detach()) if plain else tensor.detach()
    if count < len(expected):
        missing = expected[count].name
        raise SourceMismatch(
            f"the source ends at index {count}, where its metadata declares {missing!r}: {count} of "
            f"{len(expected)} were yielded",
            parameter=missing,
        )


def is_plain(tensor: Tensor) -> bool:
    """Whether the bytes of `tensor` lie in memory as they are to be sent."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether all are."""
    return (
        all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and not any(map(Tensor.is_conj, tensors))
    )


def as_plain(tensor: Tensor) -> Tensor:
    """The tensor, or if it is not plain a copy that is."""
    # Asking is cheaper than calling what mostly has nothing to do, and there may be tens of thousands.
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


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


class Declared:
    """What a source declares, by column, to compare with thousands of tensors at once.

    That is done in passes that run in C and keep nothing: a loop over tens of thousands of tensors costs five times as
    much, and as many new tuples would set the garbage collector off. A block of tensors stays in the processor's cache
    from one pass to the next.
    """

    def __init__(self, metadata: Sequence[ParamMeta]) -> None:
        self.names = [meta.name for meta in metadata]
        self._dtypes = [meta.dtype for meta in metadata]
        self._shapes = [meta.shape for meta in metadata]
        self._complex = any(meta.dtype.is_complex for meta in metadata)

    def blocks(self) -> Iterator[slice]:
        """All of it, in parts of a size that is best compared."""
        return (slice(start, start + _BLOCK) for start in range(0, len(self.names), _BLOCK))

    def agrees(self, names: list[str], tensors: list[Tensor]) -> bool:
        """Whether `agree` holds of all."""
        return names == self.names and all(self.agree(block, tensors[block]) for block in self.blocks())

    def agree(self, block: slice, tensors: list[Tensor]) -> bool:
        """Whether `tensors` are what `block` declares, plain and contiguous: `checked` would yield them as they are.

        False may mean no more than that one of them is empty or not contiguous; `checked` tells.
        """
        return (
            set(map(type, tensors)) <= {Tensor, nn.Parameter}
            and list(map(_DTYPE, tensors)) == self._dtypes[block]
            and all(map(operator.eq, map(_SHAPE, tensors), self._shapes[block]))
            and _have_memory(tensors)
            and all(map(Tensor.is_contiguous, tensors))
            and not any(map(Tensor.is_neg, tensors))
            and not (self._complex and any(map(Tensor.is_conj, tensors)))
        )


def _have_memory(tensors: list[Tensor]) -> bool:
    try:
        return all(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # another layout than the strided one
        return False


def agree(names: list[str], tensors: list[Tensor], expected: Sequence[ParamMeta]) -> bool:
    """Whether these are `expected`, in order, as `Declared.agree` has it."""
    return Declared(expected).agrees(names, tensors)
