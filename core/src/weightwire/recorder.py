"""Notes what one run of a loader does: the handler behind the stand-ins of `recording`."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from weightwire.layout import ParamMeta, dtype_name
from weightwire.load_plan import LoadPlan
from weightwire.plan_assembly import Assembly, Cause, Noted, place_of
from weightwire.staging import count_users
from weightwire.stand_in import Handler, StandIn, every, replaced, shadow_of, stand_ins, storage_key
from weightwire.twin_slots import Slots

_MOST_ONES: Final = 1 << 24
_MOST_READS: Final = 10_000
_ATEN: Final = torch.ops.aten
_COPIES: Final = frozenset((_ATEN.copy_.default, _ATEN.fill_.Tensor))
_CONSTANTS: Final = frozenset((_ATEN.fill_.Scalar, _ATEN.zero_.default))


class Origin:
    """Where the elements of a storage come from.

    Attributes:
        sources: Names of checkpoint tensors.
        index: The number of the one whose elements these are, unchanged.
        reason: Why these are no longer elements of a source; None while they are.
        keep: Keeps the storage alive, whose identity is a key.
    """

    __slots__ = ("index", "keep", "reason", "sources")

    def __init__(self, sources: frozenset[str], reason: str | None, index: int = -1) -> None:
        self.sources, self.reason, self.index = sources, reason, index
        self.keep: Any = None


class Recorder(Handler):
    """Notes one run.

    Args:
        slots: The twin's places before the run.
        sources: The whole checkpoint.

    Attributes:
        current: The source that the loader asked for last; None before the first and after the last.
    """

    def __init__(self, slots: Slots, sources: Sequence[ParamMeta]) -> None:
        self.current: str | None = None
        self._slots, self._sources = slots, sources
        self._numbers = {meta.name: index for index, meta in enumerate(sources)}
        self._origins: dict[int, Origin] = {}
        self._noted: list[Noted] = []
        self._causes: dict[str, Cause] = {}
        self._moved: set[str] = set()
        self._loose: dict[str, str] = {}
        self._window: set[int] = set()
        self._suspects: dict[str, str] = {}
        self._touched: frozenset[str] = frozenset()
        self._reads = 0
        self._doing = "a function"
        self._kept: list[Any] = []
        self._thread = threading.get_ident()

    def turn_to(self, name: str | None) -> None:
        """The loader asks for the next source: what it does from now on depends on no value read before."""
        self.current, self._reads = name, 0
        self._window, self._suspects = set(), {}
        self._touched = frozenset()

    def blamed(self) -> frozenset[str]:
        """The sources on which an exception that just came out of the loader is blamed."""
        return self._touched if self.current is None else frozenset((self.current,))

    def stand_in(self, meta: ParamMeta) -> Tensor:
        """A tensor without storage for one source."""
        shadow = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        origin = Origin(frozenset((meta.name,)), None, self._numbers[meta.name])
        origin.keep = storage = shadow.untyped_storage()
        self._origins[storage._cdata] = origin
        return StandIn(shadow, origin, self)

    def real(self, meta: ParamMeta, reason: str) -> Tensor:
        """An ordinary tensor in place of a stand-in."""
        return self._ones(meta.shape, meta.dtype, Origin(frozenset((meta.name,)), reason))

    def _ones(self, shape: Sequence[int], dtype: torch.dtype, origin: Origin) -> Tensor:
        """Values for who must have some; those of big ones are zeros, which cost no memory until written."""
        made = torch.zeros(shape, dtype=dtype)
        if made.numel() <= _MOST_ONES >> 8:
            made.fill_(1)
        self._hold(made, origin)
        return made

    def _hold(self, tensor: Tensor, origin: Origin) -> None:
        self._kept.append(tensor)
        self._origins[storage_key(tensor)] = origin

    def _origin(self, tensor: Tensor) -> Origin | None:
        if isinstance(tensor, StandIn):
            return tensor._origin  # type: ignore[no-any-return]
        return None if is_lazy(tensor) else self._origins.get(storage_key(tensor))

    # What a function of torch does.

    def unwatched(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `Handler.unwatched`: on another thread nothing else is seen."""
        if threading.get_ident() != self._thread:
            origins = [one._origin for one in stand_ins((args, kwargs))]
            self._read(origins, "is used on another thread")
        return self.function(function, args, kwargs)

    def plain(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A function without stand-ins among its arguments; what it writes is noted."""
        if next(stand_ins((args, kwargs)), None) is not None:  # types do not tell of what is assigned
            return self.function(function, args, kwargs)
        self._doing = getattr(function, "__name__", "a function")
        with _Effects(self):
            return function(*args, **kwargs)

    def copy(self, destination: Tensor, stand_in: StandIn) -> Tensor:
        """See `Handler.copy`."""
        self._touched = stand_in._origin.sources
        self._copied(destination, stand_in._shadow, stand_in._origin)
        return destination

    def read(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `Handler.read`: the values are ones, and what the loader does with them is suspect."""
        subject, name = args[0], function.__name__
        origin = self._origin(subject) if isinstance(subject, Tensor) else None
        if origin is None or (name == "__format__" and subject.dim() > 0):
            return function(*args, **kwargs) if origin is None else repr(subject)
        self._read([origin], f"is read by {name}")
        if isinstance(subject, StandIn) or subject.is_meta:
            derived = Origin(origin.sources, f"{name} reads it")
            subject = self._ones(subject.shape, subject.dtype, derived)
        return function(subject, *args[1:], **kwargs)

    def other(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `Handler.other`: it runs on shadows, and what it writes is noted by storage."""
        given = list(stand_ins((args, kwargs)))
        self._touched = frozenset().union(*(one._origin.sources for one in given))
        self._doing = getattr(function, "__name__", "a function")
        try:
            with _Effects(self):
                result = function(*replaced(args, shadow_of), **replaced(kwargs, shadow_of))
        except Exception as error:  # noqa: BLE001  anything may be missing on the meta device
            result = self._with_values(function, args, kwargs, error)
        return replaced(result, lambda leaf: self._wrapped(leaf, given, args))

    def _with_values(self, function: Callable[..., Any], args: Any, kwargs: Any, error: Exception) -> Any:
        """What does not work without values runs on ones; if it does not work at all, the first error holds."""
        given = list(stand_ins((args, kwargs)))
        if sum(one.numel() for one in given) > _MOST_ONES:
            raise error
        name = getattr(function, "__name__", "a function")
        self._read([one._origin for one in given], f"needs values for {name}")

        def valued(leaf: Any) -> Any:
            if not isinstance(leaf, StandIn):
                return leaf
            return self._ones(leaf._shadow.shape, leaf._shadow.dtype, Origin(leaf._origin.sources, f"{name} reads it"))

        try:
            with _Effects(self):
                return function(*replaced(args, valued), **replaced(kwargs, valued))
        except Exception:  # noqa: BLE001  the first error says what was wrong
            raise error from None

    def _wrapped(self, leaf: Any, given: Sequence[StandIn], args: Any) -> Any:
        """A result as the loader should see it."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, StandIn):
            return leaf
        for one in given:
            if leaf is one._shadow:
                return one
        origin = self._origin(leaf)
        if not leaf.is_meta or (origin is None and storage_key(leaf) in self._slots.by_storage):
            return leaf
        if any(leaf is one for one in every(args)):
            return leaf
        packed = any(one._packed and one._origin is origin for one in given)
        if origin is None or packed or leaf.is_conj() or leaf.is_neg():
            origin = self._derived([one._origin for one in given], f"{self._doing} gives no view")
            origin.keep = leaf
        # Whoever keeps it keeps their storages, too.
        return StandIn(leaf, origin, self, False, [(one._shadow.detach(), one._token) for one in given])

    def _derived(self, origins: Iterable[Origin], reason: str) -> Origin:
        listed = list(origins)
        first = next((origin.reason for origin in listed if origin.reason), reason)
        return Origin(frozenset().union(*(origin.sources for origin in listed)), first)

    # What an ATen operation does.

    def dispatch(self, function: Any, args: Any, kwargs: Any) -> Any:
        """See `Handler.dispatch`."""
        args, kwargs = replaced(args, shadow_of), replaced(kwargs, shadow_of)
        written = _written(function, args, kwargs)
        tensors = every((args, kwargs))
        if written:
            return self._writes(function, args, kwargs, written, tensors)
        origins = [origin for tensor in tensors if (origin := self._origin(tensor)) is not None]
        if not origins:
            return function(*args, **kwargs)
        if function is _ATEN._local_scalar_dense.default:
            self._read(origins, "is read as a number")
            return torch.ones((), dtype=args[0].dtype).item() if args[0].is_meta else function(*args, **kwargs)
        result = function(*_on_one_device(tensors, args), **_on_one_device(tensors, kwargs))
        before = {storage_key(tensor) for tensor in tensors}
        for output in every([result]):
            if storage_key(output) not in before:
                self._hold(output, self._derived(origins, f"{self._doing} gives no view"))
        return result

    def _writes(self, function: Any, args: Any, kwargs: Any, written: list[Tensor], tensors: list[Tensor]) -> Any:
        if function in _COPIES and (origin := self._origin(args[1])) is not None:
            self._copied(args[0], args[1], origin)
            return args[0]
        if function is _ATEN._foreach_copy_.default:
            for destination, source in zip(args[0], args[1], strict=True):
                self.dispatch(_ATEN.copy_.default, (destination, source), {})
            return None
        mine = {id(tensor) for tensor in written}
        read_from = [one for tensor in tensors if id(tensor) not in mine and (one := self._origin(tensor)) is not None]
        for tensor in written:
            if function in _CONSTANTS and self._filled(tensor, args[1] if len(args) > 1 else 0):
                continue
            self._spoiled(tensor, f"{self._doing} writes it", read_from)
        if len({tensor.is_meta for tensor in tensors}) == 1:
            return function(*args, **kwargs)
        if all(tensor.is_meta for tensor in written):
            return function(*_on_one_device(tensors, args), **_on_one_device(tensors, kwargs))
        return written[0] if len(written) == 1 else tuple(written)

    def _copied(self, destination: Tensor, shadow: Tensor, origin: Origin) -> None:
        target = self._slots.by_storage.get(storage_key(destination))
        if shadow.shape != destination.shape:
            shadow = shadow.expand(destination.shape)  # raises what copy_ would
        if target is None:
            self._spoiled(destination, "the loader copies it into a tensor that is no parameter", [origin])
            return
        self._moved |= origin.sources
        if not destination.numel():
            return
        self._window.add(target)
        reason = origin.reason
        if shadow.dtype is not destination.dtype:
            reason = reason or f"{dtype_name(shadow.dtype)} is cast to {dtype_name(destination.dtype)}"
        elif not shadow.is_meta or destination.is_conj() or destination.is_neg():
            reason = reason or "a copy changes the values"
        if reason or self._suspects:
            self._cause(target, reason or "", origin.sources)
        if origin.index >= 0:
            places = place_of(shadow), place_of(destination)
            self._noted.append(Noted(origin.index, places[0], target, places[1], shadow.dtype.itemsize))

    def _filled(self, tensor: Tensor, value: Any) -> bool:
        """Note a constant that goes into a target."""
        target = self._slots.by_storage.get(storage_key(tensor))
        if target is None or (isinstance(value, Tensor) and value.is_meta) or self._origin(tensor) is not None:
            return False
        if 0 in tensor.shape:
            return True
        self._window.add(target)
        if self._suspects or tensor.is_conj() or tensor.is_neg():
            return False
        element = torch.zeros((), dtype=tensor.dtype).fill_(value)
        bits = bytes(element.reshape(1).view(torch.uint8).tolist()).hex()
        place = place_of(tensor)
        self._noted.append(Noted(-1, place, target, place, tensor.dtype.itemsize, bits))
        return True

    def _spoiled(self, tensor: Tensor, reason: str, origins: Sequence[Origin]) -> None:
        """Something was written that is no region of a source."""
        sources = frozenset().union(*(origin.sources for origin in origins))
        target = self._slots.by_storage.get(storage_key(tensor))
        before = self._origin(tensor)
        if before is not None:
            before.reason = before.reason or f"changed in place: {reason}"
            before.sources |= sources
        elif target is not None:
            if 0 not in tensor.shape:
                self._window.add(target)
                self._cause(target, reason, sources)
        elif origins:
            self._hold(tensor, self._derived(origins, reason))
        if target is None:
            self._loose.update(dict.fromkeys(sources, reason))

    def _read(self, origins: Iterable[Origin], what: str) -> None:
        """The loader learns values: all that it does with this source may depend on them."""
        self._reads += 1
        if self._reads > _MOST_READS:
            raise RuntimeError("the loader reads values without end; those of a stand-in are all ones")
        for origin in origins:
            for name in origin.sources:
                self._suspects[name] = self._loose[name] = f"{name!r} {what}"
        for target in self._window:
            self._cause(target, what, ())

    def _cause(self, target: int, reason: str, sources: Iterable[str]) -> None:
        first = next(iter(self._suspects.values()), reason)
        cause = self._causes.setdefault(self._slots.owners[target], Cause(first))
        cause.sources |= {*sources, *self._suspects}

    # After the run.

    def compare(self, twin: nn.Module) -> None:
        """Note what the loader put into the twin's places."""
        for module, name, tensor in self._slots.changed(twin):
            origin = None if tensor is None else self._origin(tensor)
            cause = self._causes.setdefault(module, Cause(f"the loader replaces {name!r}"))
            cause.sources |= frozenset() if origin is None else origin.sources

    def plan(self, refused: Mapping[str, str]) -> LoadPlan:
        """The plan, after a run that went through.

        Args:
            refused: Sources that came as ordinary tensors or not at all, and why.
        """
        loose = {**self._loose, **self._held_back(), **refused}
        placed = {name for cause in self._causes.values() for name in cause.sources}
        for name in sorted(loose.keys() - placed):
            self._causes.setdefault(self._slots.prefix(name), Cause(loose[name])).sources.add(name)
        return Assembly(self._slots, self._sources, self._noted, self._causes, self._moved).plan()

    def _held_back(self) -> dict[str, str]:
        """The sources of which the loader keeps a tensor after it has returned."""
        alive = self._alive()
        if alive:
            gc.collect()
            alive = self._alive()
        return {name: f"the loader keeps {name!r}" for name in alive}

    def _alive(self) -> list[str]:
        """The sources over whose storage there is more than the storage object that is kept here."""
        origins = [one for one in self._origins.values() if one.index >= 0]
        users = count_users(one.keep._cdata for one in origins) or []
        return [name for one, count in zip(origins, users, strict=False) if count > 1 for name in one.sources]


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes, by its schema."""
    if not function._schema.is_mutable:
        return []
    found: list[Any] = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return every(found)


def _on_one_device(tensors: Sequence[Tensor], value: Any) -> Any:
    """Arguments with real tensors moved to the meta device where some are there already."""
    if len({tensor.is_meta for tensor in tensors}) < 2:
        return value
    return replaced(value, lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) and leaf.dim() else leaf)


class _Effects(TorchDispatchMode):
    """Hands every ATen operation of one function to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.dispatch(func, args, kwargs or {})
