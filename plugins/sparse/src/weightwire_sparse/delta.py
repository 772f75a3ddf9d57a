"""One sender's part of a round by deltas: what travels packed, which pieces travel whole, and how that is announced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weightwire.errors import HandshakeError
from weightwire_sparse.changes import Bytes, Changes
from weightwire_sparse.pieces import AddressSpace

_GAIN = 0.95
_TABLES = 1 << 16


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a sender is about to send in a round, as every rank hears it.

    Attributes:
        packed: Bytes of its payload; None where it has none to offer, so that the round goes dense.
        whole: Numbers of its pieces that travel whole, after the payload.
    """

    packed: int | None
    whole: tuple[int, ...] = ()

    def nbytes(self, space: AddressSpace) -> int:
        """Everything it sends."""
        return (self.packed or 0) + sum(space.pieces[number].nbytes for number in self.whole)

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return {"packed": self.packed, "whole": list(self.whole)}

    @classmethod
    def from_json(cls, record: Any, space: AddressSpace) -> Announcement:
        """Read what `to_json` wrote.

        Raises:
            HandshakeError: Anything else.
        """
        packed, whole = (record.get("packed"), record.get("whole")) if isinstance(record, Mapping) else (0, None)
        good = packed is None or (type(packed) is int and 0 <= packed <= _most(space))
        if not good or not isinstance(whole, list) or not all(one in range(len(space.pieces)) for one in whole):
            raise HandshakeError(f"trainer rank {space.sender} announced {record!r}", transport="sparse_nccl")
        return cls(packed, tuple(whole))


def _most(space: AddressSpace) -> int:
    """Bytes that no payload exceeds: a gap takes less than 9, and there are tables."""
    return space.nbytes + 9 * space.numel + _TABLES


def gains(announced: Mapping[int, Announcement], spaces: Mapping[int, AddressSpace], most: float) -> bool:
    """Whether a round goes as a delta: everybody has one, and together they are at most `most` of the dense bytes."""
    if any(one.packed is None for one in announced.values()):
        return False
    dense = sum(space.nbytes for space in spaces.values())
    return sum(one.nbytes(spaces[rank]) for rank, one in announced.items()) <= most * dense


def part_whole(changes: Changes, space: AddressSpace) -> tuple[Changes, tuple[int, ...]]:
    """Take the pieces out of which nearly everything changed.

    Returns:
        The other changes; numbers of the pieces that travel whole instead.
    """
    counts = space.counts(changes.addresses)
    sizes = np.diff(space.firsts)
    # What an address costs: a Golomb code of its gap, a bit more than the entropy.
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.where(counts > 0, np.log2(np.maximum(sizes / counts, 1)) + 1.5, 0)
    whole = np.flatnonzero(counts * (space.widths + bits / 8) > _GAIN * sizes * space.widths)
    if not len(whole):
        return changes, ()
    places, offsets = np.concatenate(([0], np.cumsum(counts))), changes.value_offsets(space)
    kept = np.setdiff1d(np.arange(len(space.pieces)), whole)
    return (
        Changes(_slices(changes.addresses, places, kept), _slices(changes.values, offsets, kept)),
        tuple(whole.tolist()),
    )


def _slices(values: Any, offsets: Any, kept: Any) -> Any:
    parts = [values[offsets[number] : offsets[number + 1]] for number in kept]
    return np.concatenate(parts) if parts else values[:0]


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What one sender sends.

    Attributes:
        payload: The packed part.
        saved: Bytes that compression saved.
        changed: Elements that changed, those of whole pieces too.
        whole: Bytes of the pieces that travel whole, by number of the piece.
    """

    payload: Bytes
    saved: int
    changed: int
    whole: Mapping[int, Bytes] = field(default_factory=dict)

    def with_whole(self, whole: Mapping[int, Bytes], changed: int) -> Delta:
        """This, and pieces that travel whole; `changed` elements changed in all."""
        return Delta(self.payload, self.saved, changed, whole)

    @property
    def announcement(self) -> Announcement:
        """How it is announced."""
        return Announcement(len(self.payload), tuple(self.whole))

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {
            "changed": self.changed,
            "payload_bytes": len(self.payload),
            "whole_pieces": len(self.whole),
            "saved_bytes": self.saved,
        }
