"""The source and the sink of a test: weights of a payload, and points at which a test can kill, stop, hold or raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from weightwire import faults
from weightwire.layout import ParamMeta
from weightwire.module_sink import ModuleSink
from weightwire.sink import Patch, Scope
from weightwire.source import WeightSource
from weightwire.testing.conformance.payloads import Payload, metadata, trainer_tensors

HALF_SENT = "source.half"
"""Reached when a source has yielded half of what its rank owns."""

FIRST_TENSOR = "sink.first_tensor"
"""Reached when a sink has got something in a round."""

Misdeed = Literal["", "order", "size", "dtype", "missing", "extra"]
"""How a source can break what its metadata promises."""

Owners = dict[str, tuple[int, ...]]


class PayloadSource(WeightSource):
    """Yields a payload in the version it is set to, tensor by tensor.

    Args:
        payload: What it sends.
        version: Of the weights.
        rank: Trainer rank.
        owners: Who owns what; a parameter that is not in it is owned by all.
        scope: `"partial"` where it is a part of the workers' models.
        whole: Offer all tensors at once, as a source over a module does.
        place: See `TransportUnderTest`.
        placed: What it returned for a source before this one.

    Attributes:
        misdeed: What it does wrong in the next pass.
    """

    def __init__(
        self,
        payload: Payload,
        version: int,
        *,
        rank: int = 0,
        owners: Mapping[str, tuple[int, ...]] | None = None,
        scope: Scope = "full",
        whole: bool = False,
        place: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        placed: dict[str, Tensor] | None = None,
    ) -> None:
        self.payload, self.version, self.rank, self.scope = payload, version, rank, scope
        self.misdeed: Misdeed = ""
        self._owners = dict(owners or {})
        self._whole = whole or place is not None
        self._place = place
        self._placed = {} if placed is None else placed

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Every parameter."""
        return metadata(self.payload, self._owners)

    def resident(self) -> tuple[list[str], list[Tensor]] | None:
        """All tensors, if they are offered at once."""
        if not self._whole or self.misdeed:
            return None
        pairs = self._pairs()
        faults.reach(HALF_SENT)
        return [name for name, _ in pairs], [tensor for _, tensor in pairs]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank owns."""
        pairs = self._pairs()
        middle = len(pairs) // 2
        for place, pair in enumerate(self._spoiled(pairs)):
            if place == middle:
                faults.reach(HALF_SENT)
            yield pair

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """The same: nothing is sharded."""
        return self.iter_full()

    def _pairs(self) -> list[tuple[str, Tensor]]:
        tensors = trainer_tensors(self.payload, self.version)
        if self._place is not None:
            if {name: one.shape for name, one in self._placed.items()} != {n: t.shape for n, t in tensors.items()}:
                self._placed.clear()
                self._placed.update(self._place(tensors))
            for name, tensor in self._placed.items():
                tensor.copy_(tensors[name])
            tensors = self._placed
        return [(name, tensors[name]) for name in self.owned_names(self.rank)]

    def _spoiled(self, pairs: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        if not pairs or not self.misdeed:
            return pairs
        last, (name, tensor) = len(pairs) - 1, pairs[-1]
        if self.misdeed == "order":
            return [*pairs[: last - 1], pairs[last], pairs[last - 1]]
        if self.misdeed == "size":
            return [*pairs[:last], (name, torch.cat((tensor, tensor)))]
        if self.misdeed == "dtype":
            return [*pairs[:last], (name, tensor.to(torch.float64))]
        if self.misdeed == "missing":
            return pairs[:last]
        return [*pairs, ("stowaway", tensor)]


class PayloadSink(ModuleSink):
    """The sink of a plain module, with a point behind the first tensor that comes in by any way."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = model

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's, from which a worker tells its device."""
        return self.model.parameters()

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """See `WeightSink.load`."""
        super().load(pairs if isinstance(pairs, Sequence) else self._noted(pairs))
        faults.reach(FIRST_TENSOR)

    def _noted(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for place, pair in enumerate(pairs):
            if place == 1:
                faults.reach(FIRST_TENSOR)
            yield pair

    def received(self, names: Iterable[str]) -> None:
        """See `WeightSink.received`."""
        super().received(names)
        faults.reach(FIRST_TENSOR)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """See `WeightSink.adopt`."""
        super().adopt(tensors)
        faults.reach(FIRST_TENSOR)

    def patch(self, patches: Sequence[Patch]) -> None:
        """See `WeightSink.patch`."""
        super().patch(patches)
        faults.reach(FIRST_TENSOR)
