"""What trainer ranks hold, and what follows from it on either side of a request."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import accumulate

from weightwire.layout import ParamMeta, layerwise_groups
from weightwire.resharding.incoming import Message as IncomingMessage
from weightwire.resharding.moves import Moves
from weightwire.resharding.outgoing import Message, Outgoing, Piece
from weightwire.resharding.source_layout import SourceLayout
from weightwire.resharding.strided import stripped
from weightwire_rdt.requests import ALIGNMENT, Holding, Move, Request


def groups_of(metadata: Sequence[ParamMeta]) -> list[int]:
    """A number for each parameter: it is the next one where a parameter is of another layer than the one before."""
    layer = {name: at for at, names in enumerate(layerwise_groups(meta.name for meta in metadata)) for name in names}
    layers = [layer[meta.name] for meta in metadata]
    return list(accumulate(int(at > 0 and layers[at] != layers[at - 1]) for at in range(len(layers))))


def layouts_of(metadata: Sequence[ParamMeta], *, whole: bool) -> list[SourceLayout]:
    """How parameters lie across the trainer ranks; `whole`: each owner has them in full."""
    if not whole:
        return [SourceLayout.of(meta) for meta in metadata]
    return [SourceLayout(meta.name, meta.shape, meta.dtype.itemsize, meta.owners) for meta in metadata]


def holding_of(
    metadata: Sequence[ParamMeta], rank: int, *, whole: bool, buffer_bytes: int, direct_bytes: int
) -> Holding:
    """What trainer rank `rank` has to give."""

    def elements(meta: ParamMeta) -> int:
        if not meta.owned_by(rank):
            return 0
        return math.prod(meta.shape if whole else meta.local_shape(rank))

    return Holding(
        rank,
        [meta.name for meta in metadata],
        [meta.dtype.itemsize for meta in metadata],
        [elements(meta) for meta in metadata],
        groups_of(metadata),
        buffer_bytes,
        min(direct_bytes, buffer_bytes),  # what is larger than a buffer fits none
    )


def write_request(moves: Moves, messages: Sequence[IncomingMessage], metadata: Sequence[ParamMeta]) -> str:
    """The request for some messages of a worker's moves, all from one trainer rank."""
    parameter, offset = moves.parameter.tolist(), moves.offset.tolist()
    axes = list(map(stripped, moves.sizes.tolist(), moves.strides.tolist()))
    names: dict[int, int] = {}
    wanted = [
        [
            [[names.setdefault(parameter[row], len(names)), offset[row], *map(list, axes[row])] for row in segment.rows]
            for segment in message.segments
        ]
        for message in messages
    ]
    record = {"parameters": [metadata[place].name for place in names], "messages": wanted}
    return json.dumps(record, separators=(",", ":"))


def outgoing_of(request: Request, holding: Holding, worker: int) -> Outgoing:
    """What goes to a worker for its request."""
    messages: list[Message] = []
    pieces: dict[int, list[Piece]] = {}
    for ordinal, segments in enumerate(request):
        rows, packed = _laid_out(segments, holding)
        # A rank meets its parameters in order: the last piece of the last one completes the message.
        rows.sort(key=lambda row: row[0].place)
        for at, (move, segment, place) in enumerate(rows):
            pieces.setdefault(move.place, []).append(
                Piece(
                    message=ordinal,
                    segment=segment,
                    place=place,
                    nbytes=holding.nbytes(move),
                    offset=move.offset,
                    sizes=move.sizes,
                    strides=move.strides,
                    dense=move.dense,
                    straight=packed[segment] is None,
                    last=at == len(rows) - 1,
                )
            )
        messages.append(Message(worker, ordinal, sum(holding.nbytes(row[0]) for row in rows), tuple(packed)))
    return Outgoing(messages, pieces, sum(message.nbytes for message in messages))


def _laid_out(
    segments: Sequence[Sequence[Move]], holding: Holding
) -> tuple[list[tuple[Move, int, int]], list[tuple[int, int] | None]]:
    """Where each move of a message is packed, and where each segment is; None: it is read where it lies."""
    rows: list[tuple[Move, int, int]] = []
    packed: list[tuple[int, int] | None] = []
    end = 0
    for number, moves in enumerate(segments):
        straight = holding.straight(moves)
        start = end = end if straight else end + -end % ALIGNMENT
        for move in moves:
            rows.append((move, number, end))
            end += 0 if straight else holding.nbytes(move)
        packed.append(None if straight else (start, end))
    return rows, packed
