"""The trainer's weights: what a transport reads, as metadata plus one or two ways to iterate over tensors."""

from __future__ import annotations

import operator
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import chain, compress, repeat
from typing import Any, Final

import torch
from torch import Tensor, nn

from weightwire.dtensor import is_dtensor, is_member, mesh_layout, piece, reshard, whole
from weightwire.errors import MetadataError, Unsupported
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

    def resident(self) -> tuple[list[str], list[Tensor]] | None:
        """The names and tensors that either way of iterating would yield, if all of them exist anyway.

        Looking at thousands of tensors at once is several times cheaper than at one after the other. None, the
        default, says that some are made while they are asked for, such as gathered or read ones.
        """
        return None


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

    @cached_property
    def _sharded(self) -> bool:
        return any(meta.owners is not None for meta in self.metadata)

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
        self._parameters = _Walk(_parameters)
        self._buffers = _Walk(_persistent_buffers) if buffers else None

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from zip(*self._lists(), strict=True)

    def _lists(self) -> tuple[list[str], list[Tensor]]:
        reshard(self._module)
        names, tensors = self._parameters(self._module)
        if self._buffers is not None:
            more = self._buffers(self._module)
            names, tensors = names + more[0], tensors + more[1]
        return names, tensors

    @property
    def device(self) -> torch.device:
        """Where the first tensor lives; the CPU if there is none."""
        tensors = chain(self._module.parameters(), self._module.buffers() if self._buffers is not None else ())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def resident(self) -> tuple[list[str], list[Tensor]] | None:
        """All tensors, unless a DTensor is among them."""
        return None if self._sharded else self._lists()


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


class _Walk:
    """Passes over one kind of tensors of a module, in the order of `named_parameters`, each once."""

    def __init__(self, kind: Callable[[nn.Module], Mapping[str, Tensor | None]]) -> None:
        self._kind = kind
        self._seen: tuple[list[Any], ...] = ()
        self._names: list[str] = []
        self._first: list[bool] = []

    def __call__(self, module: nn.Module) -> tuple[list[str], list[Tensor]]:
        """The model's own names, and the tensors."""
        paths: list[str] = []
        counts: list[int] = []
        keys: list[str] = []
        found: list[Any] = []
        for path, submodule in module.named_modules():
            if here := self._kind(submodule):
                paths.append(path)
                counts.append(len(here))
                keys += here
                found += here.values()
        # Names, and which tensors are new, follow from these alone: mostly they are as the last time. Addresses, since
        # the tensors themselves would be kept from being freed.
        seen = paths, counts, keys, list(map(id, found))
        if seen != self._seen:
            self._seen, first = seen, {id(None): -1}
            self._first = [first.setdefault(one, place) == place for place, one in enumerate(seen[-1])]
            prefixes = (f"{own}." if (own := _own_name(path)) else "" for path in paths)
            repeated = chain.from_iterable(map(repeat, prefixes, counts))
            self._names = list(compress(map(operator.add, repeated, keys), self._first))
        return self._names, found if len(self._names) == len(found) else list(compress(found, self._first))


def _parameters(module: nn.Module) -> Mapping[str, Tensor | None]:
    return module._parameters


def _persistent_buffers(module: nn.Module) -> Mapping[str, Tensor | None]:
    """The buffers that a state dict holds; no state dict is made, whose hooks may gather."""
    transient = module._non_persistent_buffers_set
    return {name: tensor for name, tensor in module._buffers.items() if name not in transient}


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

    def resident(self) -> tuple[list[str], list[Tensor]] | None:
        """All tensors of a dict without DTensors; any other mapping may make its tensors as they are asked for."""
        if self._sharded or not isinstance(self._state_dict, dict):
            return None
        pairs = dict(self._tensors())
        return list(pairs), list(pairs.values())

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
