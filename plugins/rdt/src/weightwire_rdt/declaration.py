"""What both sides of a link know of what a trainer rank has to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Self

from weightwire.errors import MessageError
from weightwire.layout import ParamMeta, layerwise_groups
from weightwire.link import parse_metadata
from weightwire.resharding.source_layout import SourceLayout
from weightwire_rdt.requests import RequestReader


def groups_of(metadata: Sequence[ParamMeta]) -> list[int]:
    """A number for each parameter: it is the next one where a parameter is of another layer than the one before."""
    layer = {name: at for at, names in enumerate(layerwise_groups(meta.name for meta in metadata)) for name in names}
    layers = [layer[meta.name] for meta in metadata]
    changes = [int(at > 0 and layers[at] != layers[at - 1]) for at in range(len(layers))]
    return list(accumulate(changes))


def layouts_of(metadata: Sequence[ParamMeta], *, whole: bool) -> list[SourceLayout]:
    """How parameters lie across the trainer ranks; `whole`: each owner has them in full."""
    if not whole:
        return [SourceLayout.of(meta) for meta in metadata]
    return [SourceLayout(meta.name, meta.shape, meta.dtype.itemsize, meta.owners) for meta in metadata]


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a trainer rank declares to its producer.

    Attributes:
        rank: The trainer rank.
        workers: How many worker ranks ask.
        metadata: Every parameter, as `ParamMeta.to_json`.
        whole: Whether it holds what it owns in full.
        buffer_bytes: Bytes that may be packed into one chunk.
        direct_bytes: Bytes from which on a contiguous piece is read where it lies.
    """

    rank: int
    workers: int
    metadata: list[dict[str, Any]]
    whole: bool
    buffer_bytes: int
    direct_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Rebuild it.

        Raises:
            MessageError: It is none.
        """
        try:
            return cls(**record)
        except TypeError as error:
            raise MessageError(f"no declaration of a trainer rank: {error}") from error

    def reader(self) -> RequestReader:
        """What reads requests to this rank."""
        metadata = parse_metadata(self.metadata)
        return RequestReader(
            metadata,
            self.rank,
            whole=self.whole,
            groups=groups_of(metadata),
            room=self.buffer_bytes,
            direct=self.direct_bytes,
        )
