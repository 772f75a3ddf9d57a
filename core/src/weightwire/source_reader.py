"""What one trainer rank reads of its source, compared with the metadata before a byte of it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Literal

from torch import Tensor

from weightwire.layout import ParamMeta
from weightwire.source import WeightSource
from weightwire.source_check import Declared, checked


class SourceReader:
    """One rank's passes over a source.

    The source is given to each pass: an engine's may be replaced by another with the same metadata.

    Args:
        metadata: Every parameter, as the source declares it.
        rank: The trainer rank.
        consumes: Which mode of the source is read.

    Attributes:
        owned: Place in the metadata and description of each parameter that this rank owns.
    """

    def __init__(self, metadata: Sequence[ParamMeta], rank: int, consumes: Literal["full", "local"]) -> None:
        self._local_rank = rank if consumes == "local" else None
        self.owned = [(place, meta) for place, meta in enumerate(metadata) if meta.owned_by(rank)]
        self._places = [place for place, _ in self.owned]
        self._metas = [meta for _, meta in self.owned]

    @cached_property
    def _declared(self) -> Declared:
        return Declared(self._metas)

    def pairs(self, source: WeightSource) -> Iterator[tuple[ParamMeta, Tensor]]:
        """See `TrainerWeightTransferEngine.pairs`."""
        if self._local_rank is None:
            return checked(source.iter_full(), self._metas)
        return checked(source.iter_local(), self._metas, local_rank=self._local_rank)

    def batches(self, source: WeightSource) -> Iterator[tuple[list[int], list[Tensor]]]:
        """See `TrainerWeightTransferEngine.batches`."""
        seen, resident = 0, source.resident()
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
        for number, (_, tensor) in enumerate(self.pairs(source)):
            if number >= seen:
                yield [self._places[number]], [tensor]

    def present(self, source: WeightSource) -> PresentSource | None:
        """See `TrainerWeightTransferEngine.present`."""
        resident = source.resident()
        if resident is None:
            return None
        return PresentSource(*resident, self._declared, self._metas, self._local_rank)


class PresentSource:
    """One rank's parameters, all there from the beginning to the end of a round.

    Attributes:
        tensors: The parameters; once `look` has returned what the metadata declares, contiguous or not.
    """

    def __init__(
        self,
        names: list[str],
        tensors: list[Tensor],
        declared: Declared,
        metas: Sequence[ParamMeta],
        local_rank: int | None,
    ) -> None:
        self.tensors = tensors
        self._names = names
        self._declared = declared
        self._metas = metas
        self._local_rank = local_rank

    def look(self, note: Callable[[Sequence[Tensor], bool], object]) -> None:
        """Compare all parameters with the metadata.

        Thousands of tensors do not fit into a processor's cache, so whatever else is to be asked of each is asked while
        it is there.

        Args:
            note: Called with some parameters at a time, in order, and whether all of them are contiguous, without
                lazy conjugation or negation.

        Raises:
            SourceMismatch: They are not what is declared.
        """
        blocks = self._declared.blocks() if self._names == self._declared.names else iter(())
        seen = 0
        for block in blocks:
            tensors = self.tensors[block]
            if not self._declared.agree(block, tensors):
                break
            note(tensors, True)
            seen += len(tensors)
        if seen < max(len(self._metas), len(self.tensors)):
            pairs = zip(self._names, self.tensors, strict=True)
            self.tensors = [one for _, one in checked(pairs, self._metas, local_rank=self._local_rank, plain=False)]
            note(self.tensors[seen:], False)
