"""The tensors of the pieces that one rank sends, by the numbers of the pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from weightwire.errors import MessageError, SourceMismatch
from weightwire.layout import ParamMeta
from weightwire.source import WeightSource
from weightwire.source_reader import SourceReader
from weightwire_sparse.pieces import AddressSpace, spaces_of


class LocalPieces:
    """One rank's view of a source, which is given to each call.

    Args:
        metadata: Every parameter.
        rank: The trainer rank.
        trainers: How many there are.

    Attributes:
        space: The pieces that it sends.
    """

    def __init__(self, metadata: Sequence[ParamMeta], rank: int, trainers: int) -> None:
        self.space = spaces_of(metadata, trainers).get(rank, AddressSpace(rank, ()))
        self._reader = SourceReader(metadata, rank, "local")
        self._places = {meta.name: place for place, meta in enumerate(metadata)}

    def each(self, source: WeightSource) -> Iterator[tuple[int, Tensor]]:
        """Go over all that the rank owns, so that gathers line up, and yield the pieces that it sends.

        Raises:
            SourceMismatch: The source yields something other than it declares.
        """
        number_of = self.space.by_place
        for places, tensors in self._reader.batches(source):
            for place, tensor in zip(places, tensors, strict=True):
                if place in number_of:
                    yield number_of[place], tensor

    def resident(self, source: WeightSource) -> dict[int, Tensor] | None:
        """The present tensor of each piece, plain or not; None if some are made while they are asked for.

        Raises:
            SourceMismatch: The source holds something other than it declares.
        """
        present = self._reader.present(source)
        if present is None:
            return None
        present.look(lambda tensors, plain: None)
        number_of = self.space.by_place
        owned = zip(self._reader.owned, present.tensors, strict=True)
        return {number_of[place]: tensor for (place, _), tensor in owned if place in number_of}

    def watched(self, source: WeightSource) -> Mapping[int, Tensor]:
        """As `resident`, nothing where that has no answer."""
        try:
            return self.resident(source) or {}
        except SourceMismatch:
            return {}  # the next pass meets the same, and says so where somebody listens

    def numbers(self, names: Iterable[str]) -> list[int]:
        """The pieces of parameters, of those that the rank sends.

        Raises:
            MessageError: There is no such parameter.
        """
        found = []
        for name in names:
            if name not in self._places:
                raise MessageError(f"there is no parameter {name!r}", transport="sparse_nccl", parameter=name)
            found.append(self.space.by_place.get(self._places[name]))
        return [number for number in found if number is not None]
