"""The trainer's weights: what a transport reads, as metadata plus one or two ways to iterate over tensors."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from weightwire.dtensor import is_dtensor, is_member, mesh_layout, piece, reshard, whole
from weightwire.errors import MetadataError, SourceMismatch, Unsupported
from weightwire.layout import ParamMeta


class WeightSource(ABC):
    """What a trainer sends: every parameter declared, and one or two ways to read them.

    * `metadata` declares every parameter of the whole model, on every rank alike; it moves nothing.
    * `iter_full()` yields each parameter this rank owns as a whole tensor.
    * `iter_local()` yields each parameter this rank owns as its piece, shaped by `ParamMeta.placements`.

    A source implements one mode or both; a transport reads the one it needs, and neither is derived from the
    other. Both yield `(name, tensor)`, exactly `owned_names(rank)` in metadata order, and each call starts a fresh
    pass. Either may run collectives among a parameter's owners: all owners iterate in one order, so they line
    up. Work is enqueued on the caller's current stream.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        metadata = cls.__dict__.get("metadata")
        if metadata is not None and not isinstance(metadata, cached_property):
            raise TypeError(
                f"{cls.__name__}.metadata must be a functools.cached_property: engines read it repeatedly and it "
                "must not change"
            )

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]:
        """Every parameter, identical on every trainer rank, ownership included; gathers nothing.

        Implement it as a `functools.cached_property`: a class whose `metadata` is anything else is a TypeError.
        """

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
        raise Unsupported(f"{type(self).__name__} does not implement iter_full")

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's piece of each name it owns."""
        raise Unsupported(f"{type(self).__name__} does not implement iter_local")


class _TensorSource(WeightSource):
    """Both modes over named tensors, some of which may be DTensors."""

    @abstractmethod
    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """A fresh pass over what is sent, in one order on every rank."""

    @cached_property
    def _declared(self) -> list[tuple[ParamMeta, str]]:
        """Each parameter, and why `iter_local` has to gather it if it has to."""
        declared = []
        for name, tensor in self._tensors():
            shape = tuple(tensor.shape)
            if not is_dtensor(tensor):
                declared.append((ParamMeta(name, tensor.dtype, shape), ""))
                continue
            layout = mesh_layout(tensor)
            meta = ParamMeta(
                name,
                tensor.dtype,
                shape,
                owners=layout.owners,
                mesh_shape=layout.mesh_shape,
                placements=layout.placements,
            )
            declared.append((meta, layout.reason))
        return declared

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """One entry for each tensor, in order; read from global shapes on first use, then kept."""
        return [meta for meta, _ in self._declared]

    @cached_property
    def gathered(self) -> dict[str, int]:
        """The names that `iter_local` yields whole, and their bytes: no box describes their pieces."""
        return {meta.name: meta.nbytes for meta, reason in self._declared if reason}

    @cached_property
    def gather_reasons(self) -> dict[str, str]:
        """Why, for each name in `gathered`, in words."""
        return {meta.name: reason for meta, reason in self._declared if reason}

    @property
    def device(self) -> torch.device:
        """Where the first tensor lives; the CPU if there is none."""
        return next((tensor.device for _, tensor in self._tensors()), torch.device("cpu"))

    def mesh_ranks(self) -> set[int]:
        """Every rank that a device mesh names: ranks of the default process group, taken as trainer ranks."""
        return {rank for meta in self.metadata for rank in meta.owners or ()}

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor itself, a DTensor gathered: a collective among the ranks of its mesh."""
        for name, tensor in self._tensors():
            if not is_dtensor(tensor):
                yield name, tensor
            elif is_member(tensor):
                yield name, whole(tensor)

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor itself, of a DTensor this rank's piece; the whole of what is in `gathered`."""
        for name, tensor in self._tensors():
            if not is_dtensor(tensor):
                yield name, tensor
            elif is_member(tensor):
                yield name, whole(tensor) if name in self.gathered else piece(tensor)


_WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


class ModuleSource(_TensorSource):
    """A module's parameters: plain, sharded by FSDP2's `fully_shard`, DTensors, or FSDP2 over tensor parallelism.

    A plain parameter is owned whole by every rank, a DTensor by the ranks of its device mesh, which are taken as
    trainer ranks: the default process group's ranks must be the trainers'. Tied parameters come once, under
    their first name. Metadata is read once: shard the module first.

    Names are the model's own. What `torch.compile` and activation checkpointing put in between (`_orig_mod.`,
    `_checkpoint_wrapped_module.`) is left out, and a `DistributedDataParallel` is seen through; a `module.` that
    comes from anything else stays.

    Args:
        module: The module, read anew in every pass.
        buffers: Send persistent buffers too, after the parameters.

    Raises:
        Unsupported: When read, if the module is wrapped by FSDP1.
    """

    def __init__(self, module: nn.Module, *, buffers: bool = False) -> None:
        self._module = _unwrapped(module)
        self._buffers = buffers

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        reshard(self._module)
        for name, parameter in self._module.named_parameters():
            yield _own_name(name), parameter
        if self._buffers:
            for name, buffer in _persistent_buffers(self._module):
                yield _own_name(name), buffer


def _unwrapped(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(compiled := getattr(module, "_orig_mod", None), nn.Module):
            module = compiled
        else:
            return module


def _own_name(name: str) -> str:
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict holds, each once; no state dict is made, whose hooks may gather."""
    seen: set[int] = set()
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            if name not in submodule._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


class StateDictSource(_TensorSource):
    """A state dict, or a callable that returns the present one. DTensors in it are read as `ModuleSource` does.

    Tied tensors (one storage, offset, shape, stride and dtype) come once, under their first name.

    Args:
        state_dict: Names and tensors; a callable is asked anew for every pass.

    Raises:
        MetadataError: When read, if a value is no tensor.
    """

    def __init__(self, state_dict: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]) -> None:
        self._state_dict = state_dict

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        state_dict = self._state_dict() if callable(self._state_dict) else self._state_dict
        # Weak: a mapping may make its tensors as they are asked for, and the address of a freed storage comes again.
        seen: dict[Any, weakref.ref[Tensor]] = {}
        for name, tensor in state_dict.items():
            if not isinstance(tensor, Tensor):
                raise MetadataError(f"{name!r} is a {type(tensor).__name__}, not a tensor: leave it out")
            identity = _identity(tensor)
            if identity in seen and seen[identity]() is not None:
                continue
            seen[identity] = weakref.ref(tensor)
            yield name, tensor


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are tied, on every rank alike: an empty piece has a storage of its own too."""
    local = piece(tensor) if is_dtensor(tensor) else tensor
    if local.layout is not torch.strided:
        return (id(tensor),)
    storage = local.untyped_storage()._cdata
    place = (storage, local.storage_offset(), local.shape, local.stride(), local.dtype, local.device)
    return (*place, local.is_conj(), local.is_neg(), tensor.shape)


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


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a 1-D uint8 view of its storage.

    Works for every dtype, for 0-d and for empty tensors; a write to the view writes the tensor.

    Raises:
        ValueError: The tensor is not contiguous, or lazily conjugated or negated: there is no such view.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not plain bytes")
    # Not reshape(-1): it keeps odd strides where there are fewer than two elements, and view(uint8) refuses them.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
