"""Random source layouts and destination layouts, and plain execution of a plan on whole numpy tensors."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from weightwire.layout import ParamMeta, Placement, Replicate, Shard
from weightwire.region import Region
from weightwire.region_boxes import merge_axes
from weightwire.resharding.demands import Demand, Workers
from weightwire.resharding.moves import Moves, segments
from weightwire.resharding.planner import Plan
from weightwire.resharding.source_layout import SourceLayout

Array = np.ndarray[Any, Any]
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
KINDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def region_of(view: torch.Tensor) -> Region:
    return Region(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))


def strided(flat: Array, region: Region) -> Array:
    bytes_of = tuple(stride * flat.itemsize for stride in region.strides)
    return as_strided(flat[region.offset :] if region.numel else flat, region.sizes, bytes_of)


def factored(random: Random, number: int) -> tuple[int, ...]:
    """A mesh shape of so many ranks, 1s included."""
    sizes = []
    while number > 1 and random.random() < 0.6:
        size = random.choice([n for n in range(1, number + 1) if number % n == 0])
        sizes.append(size)
        number //= size
    return (*sizes, number)


def random_meta(random: Random, name: str, trainers: int) -> ParamMeta:
    shape = tuple(random.choice([0, 1, 2, 3, 5, 6, 8]) if random.random() < 0.1 else random.randint(1, 8)
                  for _ in range(random.randint(0, 4)))  # fmt: skip
    dtype = random.choice(DTYPES)
    if random.random() < 0.2:
        return ParamMeta(name, dtype, shape)
    owners = tuple(random.sample(range(trainers), random.randint(1, trainers)))
    mesh_shape = factored(random, len(owners))
    placements: list[Placement] = [
        Shard(random.randrange(len(shape))) if shape and random.random() < 0.7 else Replicate() for _ in mesh_shape
    ]
    return ParamMeta(name, dtype, shape, owners=owners, mesh_shape=mesh_shape, placements=tuple(placements))


def random_view(random: Random, shape: tuple[int, ...], rank: int, workers: int) -> torch.Tensor:
    """What one worker rank reads of a parameter."""
    view = torch.empty(shape, device="meta")
    for _ in range(random.choice([0, 1, 1, 2, 4])):
        if not view.dim():
            return view.expand(random.randint(1, 3)) if random.random() < 0.3 else view
        dim, size = (at := random.randrange(view.dim())), view.shape[at]
        kind = random.choice(["shard", "shard", "slice", "transpose", "flatten", "split", "step", "expand", "window"])
        if kind == "shard" and size >= workers:
            step = -(-size // workers)
            view = view.narrow(dim, min(rank * step, size), max(min(step, size - rank * step), 0))
        elif kind == "slice" and size:
            low = random.randrange(size)
            view = view.narrow(dim, low, random.randint(1, size - low))
        elif kind == "transpose":
            view = view.permute(random.sample(range(view.dim()), view.dim()))
        elif kind == "flatten" and view.is_contiguous():
            view = view.view(-1)
        elif kind == "split" and view.numel():
            inner = random.choice([n for n in range(1, size + 1) if size % n == 0])
            view = view.view(*view.shape[:dim], -1, inner, *view.shape[dim + 1 :])
        elif kind == "step":
            view = view[(slice(None),) * dim + (slice(None, None, 2),)]
        elif kind == "expand" and view.dim() < 4:
            view = view.unsqueeze(dim).expand(*view.shape[:dim], 2, *view.shape[dim:])
        elif kind == "window" and size and view.numel() < 200 and random.random() < 0.3:
            view = view.unfold(dim, random.randint(1, min(3, size)), 1)
    return view


@dataclass
class Scene:
    metadata: list[ParamMeta]
    trainers: int
    demands: list[list[Demand]]
    buffer: int = 64
    large: int = 16

    def plan(self) -> Plan:
        layouts = [SourceLayout.of(meta) for meta in self.metadata]
        return Plan(layouts, self.trainers, Workers.of(self.demands), buffer=self.buffer, large=self.large)


def random_demands(random: Random, metadata: list[ParamMeta], rank: int, workers: int) -> list[Demand]:
    """Targets one after the other in few memories for each itemsize, some transposed, some interleaved."""
    found: list[Demand] = []
    end: dict[int, int] = defaultdict(int)
    for index, meta in enumerate(metadata):
        copies = random.choice([0, 1, 1, 1, 2, 3])
        view = random_view(random, meta.shape, rank, workers)
        for _ in range(copies):
            target = meta.dtype.itemsize * 10 + random.randrange(2)
            order = random.sample(range(view.dim()), view.dim())
            spread = random.choice([1, 1, 2])
            strides, step = [0] * view.dim(), spread
            for axis in order:
                strides[axis], step = step, step * view.shape[axis]
            base = end[target] + random.randint(0, 2)
            found.append(Demand(index, region_of(view), target, Region(base, tuple(view.shape), tuple(strides))))
            end[target] = base + max(step, 1)
            if spread == 2 and random.random() < 0.5:  # what lies between, from a view of the same extents
                between = Region(base + 1, tuple(view.shape), tuple(strides))
                found.append(Demand(index, region_of(view), target, between))
                end[target] += 1
            if random.random() < 0.5:
                view = random_view(random, meta.shape, rank, workers)
    return found


def normal(demand: Demand) -> Demand:
    """The same copy in the fewest axes, as recorded copies come."""
    source, region = demand.source, demand.region
    sizes, strides, target = merge_axes(source.sizes, source.strides, region.strides)
    return demand._replace(source=Region(source.offset, sizes, strides), region=Region(region.offset, sizes, target))


def random_scene(random: Random) -> Scene:
    trainers, workers = random.randint(1, 6), random.randint(1, 5)
    metadata = [random_meta(random, f"p{k}", trainers) for k in range(random.randint(1, 5))]
    shards = random.choice([n for n in range(1, workers + 1) if workers % n == 0])  # the rest are replicas
    distinct = [random_demands(random, metadata, rank, shards) for rank in range(shards)]
    if random.random() < 0.5:
        distinct = [[normal(demand) for demand in demands] for demands in distinct]
    demands = [list(distinct[rank % shards]) for rank in range(workers)]
    return Scene(
        metadata, trainers, demands, buffer=random.choice([8, 24, 64, 1000]), large=random.choice([1, 16, 100])
    )


def tensors(scene: Scene) -> list[Array]:
    random = np.random.default_rng(3)
    return [random.integers(0, 256, meta.nbytes, np.uint8).view(KINDS[meta.dtype.itemsize]) for meta in scene.metadata]


def memories(scene: Scene, worker: int) -> dict[int, Array]:
    """A worker's targets, of ordinals that begin with their itemsize, zeroed."""
    end: dict[int, int] = defaultdict(int)
    for demand in scene.demands[worker]:
        reach = sum(max(size - 1, 0) * t for size, t in zip(demand.region.sizes, demand.region.strides, strict=True))
        end[demand.target] = max(end[demand.target], demand.region.offset + reach + 1)
    return {target: np.zeros(size, KINDS[target // 10]) for target, size in end.items()}


def loaded(scene: Scene, worker: int, full: list[Array]) -> dict[int, Array]:
    """A worker's targets as plain loading from whole tensors leaves them."""
    found = memories(scene, worker)
    for demand in scene.demands[worker]:
        if demand.source.numel:
            strided(found[demand.target], demand.region)[...] = strided(full[demand.parameter], demand.source)
    return found


Wire = dict[tuple[int, int, int], list[bytes]]
"""The segments of each message, by sender, receiver and ordinal."""


def send(scene: Scene, rank: int, moves: Moves, full: list[Array]) -> Wire:
    """The messages of a trainer rank, from its shards alone."""
    wire: Wire = {}
    for rows in moves.messages():
        packed: dict[int, bytes] = {}
        for row in rows.tolist():
            meta = scene.metadata[int(moves.parameter[row])]
            shard = full[int(moves.parameter[row])].reshape(meta.shape)[meta.box(rank).slices()]
            region = Region(
                int(moves.offset[row]), tuple(moves.sizes[row].tolist()), tuple(moves.strides[row].tolist())
            )
            packed[row] = piece = strided(np.ascontiguousarray(shard).reshape(-1), region).tobytes()
            assert len(piece) == moves.nbytes[row]
            assert moves.place[row] % meta.dtype.itemsize == 0
        check_places(scene, moves, rows.tolist())
        parts = segments(moves.nbytes[rows].tolist(), scene.large)
        found = [b"".join(packed[int(rows[at])] for at in part) for part in parts]
        wire[rank, int(moves.receiver[rows[0]]), int(moves.message[rows[0]])] = found
    return wire


def check_places(scene: Scene, moves: Moves, rows: list[int]) -> None:
    """Pieces fit a buffer, side by side, and small ones have no gaps; a larger one is a message by itself."""
    places = sorted((int(moves.place[row]), int(moves.nbytes[row])) for row in rows)
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(places))
    assert places[-1][0] + places[-1][1] <= scene.buffer or (len(rows) == 1 and moves.direct[rows[0]])
    small = [(int(moves.place[row]), int(moves.nbytes[row])) for row in rows if moves.nbytes[row] < scene.large]
    assert [start for start, _ in small] == [0, *itertools.accumulate(size for _, size in small)][: len(small)]


def receive(scene: Scene, worker: int, moves: Moves, wire: Wire) -> dict[int, Array]:
    """A worker's targets after its messages, each of which is consumed; no element is written twice."""
    found = memories(scene, worker)
    counts = {target: np.zeros(memory.shape, np.int64) for target, memory in found.items()}
    pieces: dict[int, bytes] = {}
    for rows in moves.messages():
        message = wire.pop((int(moves.sender[rows[0]]), worker, int(moves.message[rows[0]])))
        parts = segments(moves.nbytes[rows].tolist(), scene.large)
        for segment, part in zip(message, parts, strict=True):
            for row in (int(rows[at]) for at in part):
                pieces[row], segment = segment[: int(moves.nbytes[row])], segment[int(moves.nbytes[row]) :]
            assert not segment
    writes = moves.writes
    assert writes is not None
    for k in range(len(writes)):
        row, target = int(writes.move[k]), int(writes.target[k])
        sizes = (*writes.repeat_sizes[k].tolist(), *moves.sizes[row].tolist())
        strides = (*writes.repeat_strides[k].tolist(), *writes.strides[k].tolist())
        region = Region(int(writes.offset[k]), sizes, strides)
        piece = np.frombuffer(pieces[row], KINDS[target // 10]).reshape(moves.sizes[row])
        strided(found[target], region)[...] = piece
        counts[target][
            as_strided(np.arange(len(counts[target]))[region.offset :], sizes, [8 * t for t in strides])
        ] += 1
        assert not moves.direct[row] or piece.size == math.prod(sizes)
    assert all((count <= 1).all() for count in counts.values())
    return found
