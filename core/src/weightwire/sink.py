"""Where weights go: the seam between transports, which bring bytes, and models, which get all of them or none.

One update is `begin`, ways in (`load`, `targets`, `adopt`, `patch`), `prepare`, and `commit` or `abort`. Everything
that can fail comes before commit. A transport uses the ways in and never commits; a Worker does the rest.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from weightwire.errors import Unsupported
from weightwire.layout import Box, ParamMeta, dtype_name
from weightwire.load_plan import LoadPlan
from weightwire.plan_building import plan_of_boxes

Scope = Literal["full", "partial"]
Staging = Literal["staged", "in_place"]
CommitMode = Literal["swap", "copy"]


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """What an update will bring.

    Attributes:
        metadata: Its parameters, in the order in which they travel; shapes are full ones, dtypes those of the wire.
        scope: `"full"` promises every parameter of the model, `"partial"` only those named.
    """

    metadata: tuple[ParamMeta, ...]
    scope: Scope = "full"

    def __post_init__(self) -> None:
        if self.scope not in ("full", "partial"):
            raise ValueError(f"scope must be 'full' or 'partial', not {self.scope!r}")
        object.__setattr__(self, "metadata", tuple(self.metadata))


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """New values for some elements of one parameter; its tensors stay as they are until the update is over.

    Attributes:
        name: The parameter.
        positions: Indices into the box flattened in contiguous order; 1-D, int32 or int64, no two alike, cheapest if
            ascending. None is every element of the box, in order.
        values: As many values, 1-D, of the dtype of the update; written bit for bit.
        box: The part of the full parameter that the positions count in; None is all of it.
        ascending: Whether it is known that positions ascend, each once, so that nobody has to look.
    """

    name: str
    positions: torch.Tensor | None
    values: torch.Tensor
    box: Box | None = None
    ascending: bool = False


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit did; the counts are parameters and buffers.

    Attributes:
        seconds: How long readers had to stay out.
        swapped: Rebound to the storage they were received into.
        copied: Copied under the gate, since the model would not see a rebind.
        patched: Changed in some elements.
        adopted: Rebound to storage that a transport handed over.
        in_place: Received where they are.
        allocated_bytes: Staging allocated in this update; 0 once rounds repeat.
        copied_because: How many were copied for which reason.
    """

    seconds: float
    swapped: int = 0
    copied: int = 0
    patched: int = 0
    adopted: int = 0
    in_place: int = 0
    allocated_bytes: int = 0
    copied_because: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a model, as seen by who wants to send it.

    Attributes:
        names: Its names; several where it is tied. An update brings it under one of them.
        dtype: Its dtype.
        shape: The shape that an update has to bring.
        local_shape: The part of it that is here: less than `shape` for a DTensor.
        buffer: Whether it is a persistent buffer, which a full update may leave out.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    buffer: bool

    def to_json(self) -> dict[str, Any]:
        """As `/weight_info?parameters=true` tells it."""
        return {
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "local_shape": list(self.local_shape),
            "names": list(self.names),
            "buffer": self.buffer,
        }


class WeightSink(ABC):
    """Takes the weights of one model.

    Args:
        staging: `"staged"`: received beside the live weights. `"in_place"`: over them; no second copy of the model.
        strict: Refuse names the model lacks and, in full updates, parameters the update lacks.
        cast: Convert other dtypes instead of refusing them.
        commit: `"swap"` rebinds parameters to the staged storage, `"copy"` keeps every address.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"load"})
    """The ways in that this sink has, of `load`, `targets`, `adopt` and `patch`; all have `landing`.

    `keep` and `outcome` belong to `patch`.
    """

    def __init__(
        self,
        *,
        staging: Staging = "staged",
        strict: bool = True,
        cast: bool = False,
        commit: CommitMode = "swap",
    ) -> None:
        if staging not in ("staged", "in_place"):
            raise ValueError(f"staging must be 'staged' or 'in_place', not {staging!r}")
        if commit not in ("swap", "copy"):
            raise ValueError(f"commit must be 'swap' or 'copy', not {commit!r}")
        self.staging: Staging = staging
        self.strict = strict
        self.cast = cast
        self.options = {"staging": staging, "strict": strict, "cast": cast, "commit": commit}
        self._dirty = False
        self._torn = False
        self._whole: tuple[tuple[ParamMeta, ...], LoadPlan] | None = None
        self._loose: dict[str, torch.Tensor] = {}

    def describe(self) -> dict[str, Any]:
        """What a worker says of it in hello, as JSON; with `pauses_at_commit`, that the host pauses its own readers."""
        return {"strict": self.strict, "staging": self.staging}

    @property
    def torn(self) -> bool:
        """Whether the live weights are half old, half new, until a full update commits."""
        return self._torn

    @property
    def dirty(self) -> bool:
        """Whether the open update has been writing into live weights."""
        return self._dirty

    @property
    def allocated_bytes(self) -> int:
        """Bytes of staging allocated since the last `begin`."""
        return 0

    @abstractmethod
    def begin(self, spec: UpdateSpec) -> None:
        """Open an update; nothing is written yet.

        Raises:
            UpdateRefused: The model does not take it; `parameter` names the first culprit, and the sink is as before.
        """

    @abstractmethod
    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors of full shape and the dtype of the wire; each is copied before the next one is asked for.

        Raises:
            UpdateRefused: A name, shape or dtype is not as in `begin`, or a name comes twice.
        """

    def targets(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Memory to receive into: per name a contiguous tensor of full shape and the dtype of the wire.

        Names that a sink without `strict` ignores are left out. Tell `received` when the bytes are there, and let go
        of everything derived from the tensors before `prepare`.
        """
        raise self._lacks("targets")

    def received(self, names: Iterable[str]) -> None:
        """Say that the `targets` of `names` have got their bytes.

        Raises:
            UpdateRefused: One of them has come before.
        """
        raise self._lacks("targets")

    def load_plan(self, metadata: Sequence[ParamMeta]) -> LoadPlan:
        """Which elements of these tensors an update needs, and where they land in what `landing` gives out.

        Asked before any update, and again in each: the same object while nothing has changed. Nothing in it is opaque:
        what the model can only take in full lands in full. By default every tensor lands whole.

        Raises:
            UpdateRefused: The model does not take them.
        """
        if self._whole is None or self._whole[0] != tuple(metadata):
            self._whole = tuple(metadata), plan_of_boxes((meta, None) for meta in metadata)
        return self._whole[1]

    def landing(self, plan: LoadPlan) -> dict[str, torch.Tensor]:
        """Memory for an open update: per target of a `load_plan` a flat tensor in which its regions count.

        Let go of everything derived from the tensors before `landed`.

        Raises:
            UpdateRefused: The model is no longer as it was when it was asked for the plan.
        """
        names = [target.name for target in plan.targets]
        if "targets" in self.capabilities:
            return {name: target.view(-1) for name, target in self.targets(names).items()}
        self._loose = {meta.name: torch.empty(meta.shape, dtype=meta.dtype) for meta in plan.sources}
        return {name: tensor.view(-1) for name, tensor in self._loose.items()}

    def landed(self, plan: LoadPlan) -> None:
        """Say that every element of the plan is where it belongs.

        Raises:
            UpdateRefused: The model's loader does not take what came.
        """
        if "targets" in self.capabilities:
            self.received(meta.name for meta in plan.sources)
            return
        loose, self._loose = self._loose, {}
        self.load(loose.items())

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hand storage over: at commit the parameters lie in it. They must be writable, contiguous and not used again.

        Where a parameter cannot be rebound alone, its tensor is copied instead.

        Raises:
            UpdateRefused: A name, shape or dtype is not as in `begin`, or a name comes twice.
        """
        raise self._lacks("adopt")

    # Changing what serves

    def unpatchable(self, metadata: Sequence[ParamMeta]) -> str | None:
        """Why an update of these tensors cannot be patched into what serves now, in words; None if it can.

        Asked before an update, which by then may have to bring everything.
        """
        return f"a {type(self).__name__} has no patch()"

    def patch(self, patches: Sequence[Patch]) -> None:
        """Hold changes back for `prepare`, which checks them, and `commit`, which writes them into live weights.

        One call may bring several boxes of a parameter. What a later call brings for it goes on top.

        Raises:
            UpdateRefused: A name is not in the update, came by another way, or comes twice in boxes that overlap.
        """
        raise self._lacks("patch")

    def keep(self, names: Iterable[str]) -> None:
        """Say that these tensors of the update keep the values that they have.

        Raises:
            UpdateRefused: A name is not in the update, or comes twice.
        """
        raise self._lacks("keep")

    def outcome(self, plan: LoadPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """What commit would leave in the targets of a `load_plan`, after `patch` and `keep` and before `prepare`.

        Returns:
            Each target that the plan writes, with a flat tensor in which its regions count; only to be read, and let
            go of before the next one, since one that is patched is a copy.

        Raises:
            UpdateRefused: A patch does not fit.
        """
        raise self._lacks("outcome")

    @abstractmethod
    def prepare(self) -> None:
        """Do everything that can fail.

        Raises:
            UpdateRefused: Something never came, a patch does not fit, or there is nothing whole to be patched.
        """

    @abstractmethod
    def commit(self) -> CommitReport:
        """Make the update live, with readers kept out by the caller. An error leaves the old weights, unless torn."""

    @abstractmethod
    def abort(self, *, retire: bool = False) -> None:
        """Drop the open update, if there is one.

        Args:
            retire: Late bytes may still arrive in what `targets` gave out: never use that memory again.
        """

    def inventory(self) -> list[Held]:
        """What an update may bring, in state-dict order. Empty for a model that does not tell: it loads by itself."""
        return []

    @abstractmethod
    def checksums(self) -> dict[str, str]:
        """SHA-256 in hex of the live bytes of every parameter and persistent buffer, under the state dict's names.

        A tied parameter counts once, under its first name; of a DTensor it is this rank's piece.
        """

    @abstractmethod
    def reset(self) -> None:
        """Fill every parameter with zeros, with readers kept out; `torn` is not touched.

        Buffers stay as they are, since a full update need not bring them back.
        """

    def _lacks(self, way: str) -> Unsupported:
        return Unsupported(f"{type(self).__name__} has no {way}(); it has {', '.join(sorted(self.capabilities))}")


_sinks: dict[int, tuple[weakref.ref[Any], WeightSink]] = {}
_sinks_lock = threading.Lock()


def as_sink(
    model: Any,
    *,
    staging: Staging | None = None,
    strict: bool | None = None,
    cast: bool | None = None,
    commit: CommitMode | None = None,
) -> WeightSink:
    """The sink of `model`: always the same one while the model lives.

    Args:
        model: A `WeightSink`, returned as it is; an object with a callable `load_weights`, which then loads; or an
            `nn.Module`.
        staging: See `WeightSink`, as for the others. None takes what the model's sink has, or for a new one the
            defaults: staged, strict, no cast, swap.
        strict: See `staging`.
        cast: See `staging`.
        commit: See `staging`.

    Raises:
        TypeError: `model` is none of these.
        ValueError: The model has a sink with other options.
    """
    if isinstance(model, WeightSink):
        return model
    given = {"staging": staging, "strict": strict, "cast": cast, "commit": commit}
    asked = {key: value for key, value in given.items() if value is not None}
    key = id(model)
    with _sinks_lock:
        known = _sinks.get(key)
        if known is None or known[0]() is not model:
            sink = _new_sink(model, asked)
            _sinks[key] = (weakref.ref(model, lambda _: _sinks.pop(key, None)), sink)
            return sink
    sink = known[1]
    other = {key: sink.options[key] for key, value in asked.items() if sink.options[key] != value}
    if other:
        raise ValueError(f"this model already has a sink with {other}; one model has one sink")
    return sink


def _new_sink(model: Any, options: dict[str, Any]) -> WeightSink:
    from weightwire.loader_sink import LoaderSink
    from weightwire.module_sink import ModuleSink

    if callable(getattr(model, "load_weights", None)):
        return LoaderSink(model, **options)
    if isinstance(model, nn.Module):
        return ModuleSink(model, **options)
    raise TypeError(f"cannot put weights into a {type(model).__name__}: it is no nn.Module and has no load_weights")
