"""What a worker asks a trainer rank for: JSON that names regions of declared parameters, and nothing else.

    {"parameters": [names],
     "messages": [[[[place in parameters, offset, sizes, strides], ...moves], ...segments], ...messages]}

A region counts in elements of the rank's own part of the parameter, as a contiguous tensor. The moves of a segment lie
next to each other in the message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from weightwire.errors import MessageError
from weightwire.layout import ParamMeta
from weightwire.resharding.incoming import Message as IncomingMessage
from weightwire.resharding.moves import Moves
from weightwire.resharding.outgoing import Message, Outgoing, Piece
from weightwire.resharding.strided import dense, stripped

_ALIGNMENT = 16


def write_request(moves: Moves, messages: Sequence[IncomingMessage], metadata: Sequence[ParamMeta]) -> str:
    """The request for some messages of a worker's moves, all from one trainer rank."""
    parameter, offset = moves.parameter.tolist(), moves.offset.tolist()
    axes = list(map(stripped, moves.sizes.tolist(), moves.strides.tolist()))
    names: dict[int, int] = {}
    wanted = []
    for message in messages:
        segments = []
        for segment in message.segments:
            rows = [
                [names.setdefault(parameter[row], len(names)), offset[row], *map(list, axes[row])]
                for row in segment.rows
            ]
            segments.append(rows)
        wanted.append(segments)
    record = {"parameters": [metadata[place].name for place in names], "messages": wanted}
    return json.dumps(record, separators=(",", ":"))


class RequestReader:
    """Reads requests at the trainer rank that they were sent to, and refuses what is not its own to give.

    Args:
        metadata: Every parameter.
        rank: This trainer rank.
        whole: Whether it holds what it owns in full, whatever the metadata says of shards.
        groups: Of each parameter: a message is of one.
        room: Bytes that the packed segments of a message may take.
        direct: Bytes from which on a segment that is contiguous here is read where it lies.
    """

    def __init__(
        self,
        metadata: Sequence[ParamMeta],
        rank: int,
        *,
        whole: bool,
        groups: Sequence[int],
        room: int,
        direct: int,
    ) -> None:
        self._places = {meta.name: place for place, meta in enumerate(metadata)}
        self._metadata = metadata
        self._rank = rank
        self._whole = whole
        self._groups = groups
        self._room = room
        self._direct = direct

    def read(self, text: str, worker: int) -> Outgoing:
        """What worker rank `worker` asks for.

        Raises:
            MessageError: It is no request, or asks for what this rank does not have.
        """
        return _Reading(self, worker).read(text)

    def itemsize(self, place: int) -> int:
        """Bytes of an element of a parameter."""
        return self._metadata[place].dtype.itemsize

    def numel(self, place: int) -> int:
        """Elements of a parameter that this rank holds."""
        meta = self._metadata[place]
        if not meta.owned_by(self._rank):
            return 0
        return math.prod(meta.shape if self._whole else meta.local_shape(self._rank))


class _Reading:
    """One request on its way to what is sent for it."""

    def __init__(self, reader: RequestReader, worker: int) -> None:
        self._reader = reader
        self._worker = worker
        self._taken: dict[int, int] = {}
        self._latest = 0
        self._pieces: dict[int, list[Piece]] = {}

    def read(self, text: str) -> Outgoing:
        try:
            record = json.loads(text)
        except ValueError as error:
            raise self._wrong(f"is no JSON: {error}") from error
        if not isinstance(record, dict) or set(record) != {"parameters", "messages"}:
            raise self._wrong("must have the keys parameters and messages, and no other")
        places = [self._place(name) for name in self._list(record["parameters"], "parameters")]
        messages = [
            self._message(ordinal, self._list(segments, "a message"), places)
            for ordinal, segments in enumerate(self._list(record["messages"], "messages"))
        ]
        return Outgoing(messages, self._pieces, sum(message.nbytes for message in messages))

    def _wrong(self, what: str) -> MessageError:
        return MessageError(
            f"the request of worker rank {self._worker} to trainer rank {self._reader._rank} {what}",
            transport="sharded_rdt",
        )

    def _list(self, value: Any, what: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._wrong(f"has {type(value).__name__} for {what}, not a list")
        return value

    def _place(self, name: Any) -> int:
        place = self._reader._places.get(name) if isinstance(name, str) else None
        if place is None:
            raise self._wrong(f"names {name!r}, which is not declared")
        if not self._reader.numel(place):
            raise self._wrong(f"names {name!r}, of which that rank has nothing")
        return place

    def _message(self, ordinal: int, segments: list[Any], places: Sequence[int]) -> Message:
        found = [[self._move(move, places) for move in self._list(moves, "a segment")] for moves in segments]
        if not found or not all(found):
            raise self._wrong(f"has an empty message or segment, in message {ordinal}")
        self._check_order(ordinal, [move[0] for moves in found for move in moves])
        packed: list[tuple[int, int] | None] = []
        low = 0
        rows = []
        for number, moves in enumerate(found):
            lengths = [self._nbytes(move) for move in moves]
            straight = len(moves) == 1 and lengths[0] >= self._reader._direct and dense(*moves[0][2:])
            packed.append(None if straight else (low, low + sum(lengths)))
            for move, nbytes in zip(moves, lengths, strict=True):
                if not straight and low % self._reader.itemsize(move[0]):
                    raise self._wrong(f"packs message {ordinal} so that elements lie between their boundaries")
                rows.append((move, number, low, nbytes, straight))
                low += 0 if straight else nbytes
            low += -low % _ALIGNMENT
        if low > self._reader._room + _ALIGNMENT * len(found):
            raise self._wrong(f"packs {low} bytes into message {ordinal}, and a buffer has {self._reader._room}")
        last = max(range(len(rows)), key=lambda row: (rows[row][0][0], row))
        for row in sorted(range(len(rows)), key=lambda row: rows[row][0][0]):
            (place, offset, sizes, strides), number, start, nbytes, straight = rows[row]
            self._pieces.setdefault(place, []).append(
                Piece(
                    message=ordinal,
                    segment=number,
                    place=start,
                    nbytes=nbytes,
                    offset=offset,
                    sizes=sizes,
                    strides=strides,
                    dense=dense(sizes, strides),
                    straight=straight,
                    last=row == last,
                )
            )
        return Message(self._worker, ordinal, sum(row[3] for row in rows), tuple(packed))

    def _check_order(self, ordinal: int, places: Sequence[int]) -> None:
        """A rank goes through its parameters once: a message must be complete when the next one begins."""
        if min(places) < self._latest:
            raise self._wrong(f"goes back to an earlier parameter in message {ordinal}")
        self._latest = max(places)
        if self._reader._groups[min(places)] != self._reader._groups[self._latest]:
            raise self._wrong(f"mixes layers in message {ordinal}")

    def _nbytes(self, move: tuple[int, int, tuple[int, ...], tuple[int, ...]]) -> int:
        return math.prod(move[2]) * self._reader.itemsize(move[0])

    def _move(self, move: Any, places: Sequence[int]) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        if not (isinstance(move, list) and len(move) == 4):
            raise self._wrong(f"has the move {move!r}, not [parameter, offset, sizes, strides]")
        name, offset, sizes, strides = move
        numbers = [name, offset, *self._list(sizes, "sizes"), *self._list(strides, "strides")]
        if any(type(number) is not int or number < 0 for number in numbers) or len(sizes) != len(strides):
            raise self._wrong(f"has the move {move!r}, which is no region")
        if name >= len(places) or 0 in sizes:
            raise self._wrong(f"has the move {move!r}, of no parameter or no element")
        place = places[name]
        held, parameter = self._reader.numel(place), self._reader._metadata[place].name
        last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if last >= held:
            raise self._wrong(f"wants element {last} of {parameter!r}, of which that rank has {held}")
        taken = self._taken[place] = self._taken.get(place, 0) + math.prod(sizes)
        if taken > held:
            raise self._wrong(f"wants {taken} elements of {parameter!r}, of which that rank has {held}")
        return place, offset, tuple(sizes), tuple(strides)
