"""What a worker asks a trainer rank for: JSON that names regions of declared parameters, and nothing else.

    {"parameters": [names],
     "messages": [[[[place in parameters, offset, sizes, strides], ...moves], ...segments], ...messages]}

A region counts in elements of the rank's own part of the parameter, as a contiguous tensor. The moves of a segment lie
next to each other in the message. Nothing here needs torch: a producer must be there quickly.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from weightwire.errors import MessageError
from weightwire.region_boxes import row_major

ALIGNMENT = 16
"""Bytes at which the segments of a message begin where they are packed."""
_MOST_AXES = 64


class Move(NamedTuple):
    """A region: place of its parameter in the metadata, and `part.as_strided(sizes, strides, offset)`."""

    place: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dense(self) -> bool:
        """Whether it is contiguous in the rank's part."""
        return self.strides == row_major(self.sizes)


Request = list[list[list[Move]]]
"""Messages of segments of moves."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a trainer rank has to give, by place in the metadata, and how it gives it.

    Attributes:
        rank: The trainer rank.
        names: Of the parameters.
        itemsizes: Bytes of an element of each.
        elements: How many of each this rank has.
        groups: Layer of each; a message is of one.
        buffer_bytes: Bytes that may be packed into a message.
        direct_bytes: Bytes from which on a contiguous region is read where it lies.
    """

    rank: int
    names: list[str]
    itemsizes: list[int]
    elements: list[int]
    groups: list[int]
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
            raise MessageError(f"not what a trainer rank holds: {error}") from error

    def nbytes(self, move: Move) -> int:
        """Bytes of a region."""
        return math.prod(move.sizes) * self.itemsizes[move.place]

    def straight(self, moves: Sequence[Move]) -> bool:
        """Whether a segment of these is read where it lies."""
        return len(moves) == 1 and self.nbytes(moves[0]) >= self.direct_bytes and moves[0].dense

    def read(self, text: str, worker: int) -> Request:
        """What worker rank `worker` asks for.

        Raises:
            MessageError: It is no request, or asks for what this rank does not have.
        """
        return _Reading(self, worker).read(text)


class _Reading:
    """One request, on its way to being believed."""

    def __init__(self, holding: Holding, worker: int) -> None:
        self._holding = holding
        self._places = {name: place for place, name in enumerate(holding.names)}
        self._worker = worker
        self._taken: dict[int, int] = {}
        self._latest = 0

    def read(self, text: str) -> Request:
        try:
            record = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise self._wrong(f"is no JSON: {error}") from error
        if not isinstance(record, dict) or set(record) != {"parameters", "messages"}:
            raise self._wrong("must have the keys parameters and messages, and no other")
        places = [self._place(name) for name in self._list(record["parameters"], "parameters")]
        return [
            self._message(ordinal, self._list(segments, "a message"), places)
            for ordinal, segments in enumerate(self._list(record["messages"], "messages"))
        ]

    def _wrong(self, what: str) -> MessageError:
        return MessageError(
            f"the request of worker rank {self._worker} to trainer rank {self._holding.rank} {what}",
            transport="sharded_rdt",
        )

    def _list(self, value: Any, what: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._wrong(f"has {type(value).__name__} for {what}, not a list")
        return value

    def _place(self, name: Any) -> int:
        place = self._places.get(name) if isinstance(name, str) else None
        if place is None:
            raise self._wrong(f"names {reprlib.repr(name)}, which is not declared")
        if not self._holding.elements[place]:
            raise self._wrong(f"names {name!r}, of which that rank has nothing")
        return place

    def _message(self, ordinal: int, segments: list[Any], places: Sequence[int]) -> list[list[Move]]:
        found = [[self._move(move, places) for move in self._list(moves, "a segment")] for moves in segments]
        if not found or not all(found):
            raise self._wrong(f"has an empty message or segment, in message {ordinal}")
        self._check_order(ordinal, [move.place for moves in found for move in moves])
        self._check_room(ordinal, found)
        return found

    def _check_order(self, ordinal: int, places: Sequence[int]) -> None:
        """A rank goes through its parameters once: a message must be complete when the next one begins."""
        if min(places) < self._latest:
            raise self._wrong(f"goes back to an earlier parameter in message {ordinal}")
        self._latest = max(places)
        if self._holding.groups[min(places)] != self._holding.groups[self._latest]:
            raise self._wrong(f"mixes layers in message {ordinal}")

    def _check_room(self, ordinal: int, segments: Sequence[Sequence[Move]]) -> None:
        packed = 0
        for moves in segments:
            if self._holding.straight(moves):
                continue
            packed += -packed % ALIGNMENT
            for move in moves:
                if packed % self._holding.itemsizes[move.place]:
                    raise self._wrong(f"packs message {ordinal} so that elements lie across their boundaries")
                packed += self._holding.nbytes(move)
        if packed > self._holding.buffer_bytes + ALIGNMENT:
            raise self._wrong(f"packs {packed} bytes into message {ordinal}, of {self._holding.buffer_bytes}")

    def _move(self, move: Any, places: Sequence[int]) -> Move:
        if not (isinstance(move, list) and len(move) == 4):
            raise self._wrong(f"has the move {reprlib.repr(move)}, not [parameter, offset, sizes, strides]")
        number, offset, sizes, strides = move
        numbers = [number, offset, *self._list(sizes, "sizes"), *self._list(strides, "strides")]
        if any(type(each) is not int or each < 0 for each in numbers) or not len(sizes) == len(strides) <= _MOST_AXES:
            raise self._wrong(f"has the move {reprlib.repr(move)}, which is no region")
        if number >= len(places) or 0 in sizes:
            raise self._wrong(f"has the move {reprlib.repr(move)}, of no parameter or no element")
        place = places[number]
        held, name = self._holding.elements[place], self._holding.names[place]
        last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if max(last, 0, *strides) >= held:  # torch takes no stride of 2**63, even along one element
            raise self._wrong(f"wants an element past the end of {name!r}, of which that rank has {held}")
        taken = self._taken[place] = self._taken.get(place, 0) + math.prod(sizes)
        if taken > held:
            raise self._wrong(f"wants too many elements of {name!r}, of which that rank has {held}")
        return Move(place, offset, tuple(sizes), tuple(strides))
