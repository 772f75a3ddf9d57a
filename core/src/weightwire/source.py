"""The trainer's weights: metadata, and one or two ways to iterate over the tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weightwire.dtensor import gather_reason, is_member, layout_of, local_piece, materialise
from weightwire.errors import SourceMismatch
from weightwire.layout import ParamMeta


class WeightSource(ABC):
    """What a trainer sends, as metadata plus one or two iteration modes.

    * `metadata` declares every parameter of the whole model, on every rank alike; it moves nothing.
    * `iter_full()` yields each parameter this rank owns as a whole tensor.
    * `iter_local()` yields each parameter this rank owns as the piece that `ParamMeta.placements` describe.

    A source implements one mode or both. Both yield `(name, tensor)` in metadata order, and may run collectives among
    a parameter's owners: every owner iterates in the same order, so they line up. Work goes to the caller's current
    stream. Each call starts a fresh pass.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        metadata = cls.__dict__.get("metadata")
        if metadata is not None and not isinstance(metadata, cached_property):
            raise TypeError(
                f"{cls.__name__}.metadata must be a functools.cached_property: engines read it repeatedly and it must "
                "not change"
            )

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]:
        """Every parameter, identical on all trainer ranks. Implement it as a `functools.cached_property`."""

    def owned_names(self, rank: int) -> list[str]:
        """The names `rank` owns, in metadata order: exactly what it iterates."""
        return [meta.name for meta in self.metadata if meta.owned_by(rank)]

    def implements_iter_full(self) -> bool:
        """Whether this source yields whole tensors."""
        return type(self).iter_full is not WeightSource.iter_full

    def implements_iter_local(self) -> bool:
        """Whether this source yields local pieces."""
        return type(self).iter_local is not WeightSource.iter_local

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensor of each name this rank owns."""
        raise NotImplementedError(f"{type(self).__name__} does not implement iter_full")

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's piece of each name it owns."""
        raise NotImplementedError(f"{type(self).__name__} does not implement iter_local")


class _TensorSource(WeightSource):
    """Over named tensors, which may be DTensors; tied ones come once, under their first name."""

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """One entry per tensor; global shapes are read, nothing is gathered."""
        metas = []
        for name, tensor in self._tensors():
            layout = layout_of(tensor)
            if layout is None:
                metas.append(ParamMeta(name, tensor.dtype, tuple(tensor.shape)))
            else:
                owners, mesh_shape, placements = layout
                metas.append(
                    ParamMeta(
                        name,
                        tensor.dtype,
                        tuple(tensor.shape),
                        owners=owners,
                        mesh_shape=mesh_shape,
                        placements=placements,
                    )
                )
        return metas

    @property
    def gathered(self) -> dict[str, tuple[int, str]]:
        """What `iter_local` has to gather because no `Shard` describes it: name to bytes and reason."""
        reasons = ((name, tensor, gather_reason(tensor)) for name, tensor in self._tensors())
        return {
            name: (tensor.numel() * tensor.dtype.itemsize, reason)
            for name, tensor, reason in reasons
            if reason is not None
        }

    @property
    def device(self) -> torch.device:
        """Where the first tensor lives."""
        first = next(self._tensors(), None)
        return torch.device("cpu") if first is None else first[1].device

    def mesh_ranks(self) -> set[int]:
        """Every rank that a device mesh of this source names; they are taken as trainer ranks."""
        return {rank for meta in self.metadata for rank in meta.owners or ()}

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors; a DTensor is gathered among its owners."""
        for name, tensor in self._tensors():
            if is_member(tensor):
                yield name, materialise(tensor)

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield local pieces; a DTensor that no `Shard` describes is gathered."""
        for name, tensor in self._tensors():
            if is_member(tensor):
                yield name, local_piece(tensor)


class ModuleSource(_TensorSource):
    """A module's parameters: plain, FSDP2, DTensor, or FSDP2 over tensor parallelism.

    A plain parameter is owned by every rank, a DTensor by the ranks of its device mesh. Tied parameters come once. Names
    are those of the module that was wrapped by `torch.compile` or `DistributedDataParallel`. Metadata is read once:
    shard the module first.

    Args:
        module: The module.
        buffers: Send persistent buffers too.
    """

    def __init__(self, module: torch.nn.Module, *, buffers: bool = False) -> None:
        self._module = _unwrapped(module)
        self._buffers = buffers

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            yield _plain_name(name), parameter
        if self._buffers:
            persistent = self._module.state_dict(keep_vars=True).keys()
            for name, buffer in self._module.named_buffers():
                if name in persistent:
                    yield _plain_name(name), buffer


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
            module = inner
        else:
            return module


def _plain_name(name: str) -> str:
    return ".".join(segment for segment in name.split(".") if segment != "_orig_mod")


class StateDictSource(_TensorSource):
    """A state dict, or a callable that returns the present one; tied tensors come once, under their first name.

    Args:
        state_dict: Names and tensors; or a callable, asked anew for every pass.
    """

    def __init__(self, state_dict: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]) -> None:
        self._state_dict = state_dict

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        state = self._state_dict() if callable(self._state_dict) else self._state_dict
        seen: set[Any] = set()
        for name, tensor in state.items():
            identity = _identity(tensor)
            if identity in seen:
                continue
            seen.add(identity)
            yield name, tensor


def _identity(tensor: Tensor) -> Any:
    """Equal for two tensors that are one: same storage, place and type. Empty tensors are never one."""
    local = tensor.to_local() if layout_of(tensor) is not None else tensor  # type: ignore[attr-defined]
    if local.numel() == 0:
        return id(tensor)
    return (
        local.untyped_storage().data_ptr(),
        local.storage_offset(),
        tuple(tensor.shape),
        local.stride(),
        local.dtype,
    )


def checked(
    pairs: Iterable[tuple[str, Tensor]], expected: Sequence[ParamMeta], *, local_rank: int | None = None
) -> Iterator[tuple[ParamMeta, Tensor]]:
    """Compare what a source yields with its metadata, item by item, before anything is done with it.

    Args:
        pairs: What the source yields.
        expected: What it declared, for this rank.
        local_rank: The trainer rank whose pieces these are; None for whole tensors.

    Yields:
        The metadata and the tensor: detached, contiguous, with conjugation and negation resolved.

    Raises:
        SourceMismatch: Another name, order, dtype, shape or number than declared; the first one is named.
    """
    index = -1
    for index, (name, tensor) in enumerate(pairs):
        if index >= len(expected):
            raise SourceMismatch(f"the source yields {name!r} at index {index}, after all it declared", parameter=name)
        meta = expected[index]
        shape = meta.shape if local_rank is None else meta.local_shape(local_rank)
        if name != meta.name:
            raise SourceMismatch(
                f"the source yields {name!r} at index {index}, where its metadata declares {meta.name!r}",
                parameter=name,
            )
        if tensor.dtype != meta.dtype or tuple(tensor.shape) != shape:
            raise SourceMismatch(
                f"the source yields {name!r} at index {index} as {tensor.dtype} of shape {tuple(tensor.shape)}, and "
                f"declared {meta.dtype} of shape {shape}",
                parameter=name,
            )
        yield meta, tensor.detach().resolve_conj().resolve_neg().contiguous()
    if index + 1 < len(expected):
        missing = expected[index + 1].name
        raise SourceMismatch(
            f"the source ends after {index + 1} parameters and declared {len(expected)}: {missing!r} is missing",
            parameter=missing,
        )


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor of any dtype, as a 1-D uint8 view of the same storage."""
    return tensor.detach().reshape(-1).view(torch.uint8)
