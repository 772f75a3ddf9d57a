"""What one trainer rank reads of its source, compared with the metadata before a byte of it moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal

from torch import Tensor

from weightwire.layout import ParamMeta
from weightwire.source import WeightSource
from weightwire.source_check import Declared, checked


class SourceReader:
    """One rank's passes over a source.

    Args:
        source: The weights.
        metadata: Every parameter, as the source declares it.
        rank: The trainer rank.
        consumes: Which mode of the source is read.

    Attributes:
        owned: Place in the metadata and description of each parameter that this rank owns.
    """

    def __init__(
        self, source: WeightSource, metadata: Sequence[ParamMeta], rank: int, consumes: Literal["full", "local"]
    ) -> None:
        self._source = source
        self._local_rank = rank if consumes == "local" else None
        self.owned = [(place, meta) for place, meta in enumerate(metadata) if meta.owned_by(rank)]
        self._places = [place for place, _ in self.owned]
        self._metas = [meta for _, meta in self.owned]

    @cached_property
    def _declared(self) -> Declared:
        return Declared(self._metas)

    def pairs(self) -> Iterator[tuple[ParamMeta, Tensor]]:
        """See `TrainerWeightTransferEngine.pairs`."""
        if self._local_rank is None:
            return checked(self._source.iter_full(), self._metas)
        return checked(self._source.iter_local(), self._metas, local_rank=self._local_rank)

    def batches(self) -> Iterator[tuple[list[int], list[Tensor]]]:
        """See `TrainerWeightTransferEngine.batches`."""
        seen, resident = 0, self._source.resident()
        if resident is not None and resident[0] == self._declared.names:
            for block in self._declared.blocks():
                tensors = resident[1][block]
                if not self._declared.agree(block, tensors):
                    break
                yield self._places[block], tensors
                seen += len(tensors)
            else:
                return
        # Whatever is unusual is looked at one by one, which names the first culprit.
        for number, (_, tensor) in enumerate(self.pairs()):
            if number >= seen:
                yield [self._places[number]], [tensor]

    def present(self) -> list[Tensor] | None:
        """See `TrainerWeightTransferEngine.present`."""
        resident = self._source.resident()
        if resident is None or self._declared.agrees(*resident):
            return None if resident is None else resident[1]
        pairs = zip(*resident, strict=True)
        return [tensor for _, tensor in checked(pairs, self._metas, local_rank=self._local_rank, plain=False)]
