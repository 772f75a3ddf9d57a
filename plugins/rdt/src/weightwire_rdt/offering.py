"""A trainer rank's pass over its source: layer after layer, and never too many at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from weightwire.deadline import Deadline
from weightwire.errors import TransferError
from weightwire.layout import ParamMeta
from weightwire.resharding.outgoing import Sending


class Served(Protocol):
    """A trainer rank's end of a wire, as far as this needs it."""

    def unread(self) -> set[tuple[int, int]]:
        """The chunks that have been offered and not read."""

    def wait(self, keys: set[tuple[int, int]], deadline: Deadline) -> None:
        """Wait until these have been read."""


@dataclass(slots=True)
class _Layer:
    """Chunks that have not been read, and what is read where it lies, with its version."""

    unread: set[tuple[int, int]] = field(default_factory=set)
    read_in_place: list[tuple[int, Tensor, int]] = field(default_factory=list)


class Offering:
    """One pass.

    Args:
        sending: Packs pieces and offers chunks.
        wire: Says what has been read.
        groups: Layer of each parameter that comes, in order.
        lookahead: How many layers besides the one that is read may be there; None where all are there anyway.
        metadata: Every parameter.
        straight: Places of those that are read where they lie.
    """

    def __init__(
        self,
        sending: Sending,
        wire: Served,
        groups: Sequence[int],
        *,
        lookahead: int | None,
        metadata: Sequence[ParamMeta],
        straight: Collection[int],
    ) -> None:
        self._sending = sending
        self._wire = wire
        self._groups = groups
        self._lookahead = lookahead
        self._metadata = metadata
        self._straight = straight
        self._seen = 0
        self._layers = deque([_Layer()])

    def offer(self, place: int, tensor: Tensor, deadline: Deadline) -> None:
        """Offer what was asked of one parameter; returns when the source may make the next one.

        Args:
            place: In the metadata.
            tensor: This rank's part of it.
            deadline: Of the round.
        """
        if place in self._straight and not tensor.is_inference():
            self._layers[-1].read_in_place.append((place, tensor, tensor._version))
        self._sending.send(place, tensor)
        self._seen += 1
        if self._lookahead is None or self._seen == len(self._groups):
            return
        if self._groups[self._seen] != self._groups[self._seen - 1]:
            # No chunk is of two layers: all of this one's are offered.
            self._layers[-1].unread = self._wire.unread() - {key for layer in self._layers for key in layer.unread}
            self._layers.append(_Layer())
            if len(self._layers) > self._lookahead + 1:
                self._wire.wait(self._layers[0].unread, deadline)
                self._check(self._layers.popleft())

    def check_unwritten(self) -> None:
        """Make sure that nothing was written while it was read.

        Raises:
            TransferError: A parameter was; it is named.
        """
        for layer in self._layers:
            self._check(layer)
        self._layers.clear()

    def _check(self, layer: _Layer) -> None:
        for place, tensor, version in layer.read_in_place:
            if tensor._version != version:
                name = self._metadata[place].name
                raise TransferError(
                    f"parameter {name!r} was written while workers were reading it: send between optimiser steps",
                    transport="sharded_rdt",
                    parameter=name,
                )
