"""Who sends what to whom: a pure function of metadata and demands, the same on every rank.

Equal layouts that are wanted alike are planned once: a model has tens of such classes, whatever its size. A rank
holds the classes, a few integers for each parameter, and its own part of the moves.
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from weightwire.errors import MetadataError, UpdateRefused
from weightwire.resharding.classes import Block, Classes, Groups, PlanClass, block
from weightwire.resharding.demands import Wanted, Workers, intern
from weightwire.resharding.geometry import Geometry
from weightwire.resharding.moves import Moves
from weightwire.resharding.parts import assemble
from weightwire.resharding.source_layout import Integers, SourceLayout


class Instance(NamedTuple):
    """One parameter: its class, who holds each of its cells, and who was chosen to send."""

    of: PlanClass
    ordinal: int
    groups: Groups
    chosen: dict[int, Integers]  # by cell that several hold: the sender for each of its receivers


@dataclass(frozen=True, slots=True)
class Coverage:
    """What of the metadata is wanted.

    Attributes:
        unclaimed: Names of parameters with elements of which no worker wants any, in metadata order.
        lower_bound: Bytes of different source elements that each worker rank wants, summed over the ranks.
        wire: Bytes that cross.
    """

    unclaimed: tuple[str, ...]
    lower_bound: int
    wire: int

    def check(self, *, strict: bool = True, foreign: Collection[str] = ()) -> None:
        """Refuse names that nobody takes.

        Args:
            strict: Otherwise none is refused.
            foreign: Names that are known to be for somebody else.

        Raises:
            UpdateRefused: Names the first.
        """
        lost = [name for name in self.unclaimed if name not in foreign] if strict else []
        if lost:
            more = f", nor {len(lost) - 1} more" if len(lost) > 1 else ""
            raise UpdateRefused(
                f"no worker takes parameter {lost[0]!r}{more}: declare it foreign, or load with strict=False",
                parameter=lost[0],
            )


class Plan:
    """Who sends what to whom, for all ranks; `for_trainer` and `for_worker` are the parts of one.

    Args:
        layouts: The parameters, in metadata order.
        trainers: How many trainer ranks there are.
        workers: What every worker rank wants.
        buffer: Bytes of a message at most, unless it is one contiguous move.
        large: Bytes from which on a move travels by itself within its message, see `segments`.
        groups: Of each parameter: a message is within one. None where all are of one.
        beside: Bytes that a message may have besides `buffer`, of large moves that are contiguous on either side. None
            where these count like the others.
        ordinal: Of a worker that plans alone, among those that do: replicas are spread over such workers by it, and
            `workers` is this one. None where all ranks plan together and the least busy replica sends.

    Raises:
        MetadataError: A parameter has owners that are no trainer ranks, or a demand does not fit its parameter.
    """

    def __init__(
        self,
        layouts: Sequence[SourceLayout],
        trainers: int,
        workers: Workers,
        *,
        buffer: int = 16 << 20,
        large: int = 1 << 20,
        groups: Sequence[int] | None = None,
        beside: int | None = None,
        ordinal: int | None = None,
    ) -> None:
        widest = max((layout.itemsize for layout in layouts), default=1)
        if buffer < widest:
            raise MetadataError(f"a buffer of {buffer} bytes does not hold an element of {widest}")
        self.layouts = layouts
        self.trainers = trainers
        self.workers = workers
        self.buffer = buffer
        self.large = large
        self._groups = None if groups is None else np.asarray(groups, np.int64)
        self._beside = beside
        self._alone = None if ordinal is None else _Alone(ordinal)
        self.sent = [0] * trainers
        """Bytes that each trainer rank sends."""
        interned = intern(layouts, workers)
        self._wanted = interned.by_plan
        by_parameter: list[list[tuple[int, int]]] = [[] for _ in layouts]
        for plan, of_plan in enumerate(interned.by_plan):
            for parameter, wanted in of_plan.items():
                by_parameter[parameter].append((plan, wanted.signature))
        self._classes = Classes(trainers, workers, interned, buffer)
        self.instances = [self._instance(layout, of) for layout, of in zip(layouts, by_parameter, strict=True)]
        self._axes = self._classes.axes()
        self._blocks: dict[tuple[int, int], Block] = {}

    def _instance(self, layout: SourceLayout, wanted: Sequence[tuple[int, int]]) -> Instance:
        ordinal, groups = self._classes.place(layout, wanted)
        of = self._classes.found[ordinal]
        if self._alone is not None:
            return Instance(of, ordinal, groups, self._alone.choose(layout, of, groups, self.sent))
        return Instance(of, ordinal, groups, _choose(of, groups, self.sent))

    @property
    def classes(self) -> Sequence[PlanClass]:
        """In the order in which parameters first need them."""
        return self._classes.found

    @cached_property
    def coverage(self) -> Coverage:
        """What is wanted of the metadata, and what it costs."""
        unclaimed = tuple(
            layout.name
            for layout, instance in zip(self.layouts, self.instances, strict=True)
            if len(instance.of.cells) and not instance.of.lower_bound
        )
        return Coverage(unclaimed, sum(each.of.lower_bound for each in self.instances), sum(self.sent))

    def for_trainer(self, rank: int) -> Moves:
        """What a trainer rank sends."""
        assert 0 <= rank < self.trainers, rank
        return self._moves(self._sent_by(rank))

    def for_worker(self, rank: int) -> Moves:
        """What a worker rank receives, with where it goes."""
        return self._moves(self._received_by(rank), writes=True)

    def everything(self) -> Moves:
        """The moves of all ranks; far more memory than a part takes."""
        return self._moves(
            (parameter, cell, sender, receiver)
            for parameter, instance in enumerate(self.instances)
            for cell in range(len(instance.of.cells))
            for sender, receiver in self._pairs(instance, cell)
        )

    @staticmethod
    def _pairs(instance: Instance, cell: int) -> Iterator[tuple[int, int]]:
        ranks = instance.of.receivers[cell][0]
        group = instance.groups[cell]
        return zip([group[0]] * len(ranks) if len(group) == 1 else _senders(instance, cell), ranks, strict=True)

    def _sent_by(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        holds: dict[Groups, list[int]] = {}
        for parameter, instance in enumerate(self.instances):
            key = instance.groups
            cells = holds.get(key)
            if cells is None:
                cells = holds[key] = [cell for cell, group in enumerate(key) if rank in group]
            for cell in cells:
                for sender, receiver in self._pairs(instance, cell):
                    if sender == rank:
                        yield parameter, cell, rank, receiver

    def _received_by(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        plan = self.workers.plan_of[rank]
        for parameter in self._wanted[plan]:
            instance = self.instances[parameter]
            for cell in instance.of.taken[plan].pieces:
                sender = instance.groups[cell][0]
                if cell in instance.chosen:
                    sender = int(instance.chosen[cell][bisect_left(instance.of.receivers[cell][0], rank)])
                yield parameter, cell, sender, rank

    def _moves(self, keys: Iterator[tuple[int, int, int, int]], *, writes: bool = False) -> Moves:
        entries, blocks = [], []
        wanted: list[Wanted] = []
        for key in keys:
            parameter, cell, _, receiver = key
            plan = self.workers.plan_of[receiver]
            of = self.instances[parameter].of
            entries.append(key)
            blocks.append(self._block(of.taken[plan], cell, of.itemsize))
            if writes:
                wanted.append(self._wanted[plan][parameter])
        return assemble(
            entries,
            blocks,
            wanted if writes else None,
            self._axes,
            self.buffer,
            self.large,
            self._groups,
            self._beside,
        )

    def _block(self, of: Geometry, cell: int, itemsize: int) -> Block:
        key = (id(of), cell)  # geometries live as long as the plan
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = block(of, cell, itemsize, *self._axes)
        return found

    def traffic(self) -> Integers:
        """Bytes from each trainer rank to each worker rank."""
        bytes_between = np.zeros((self.trainers, len(self.workers.plan_of)), np.int64)
        for instance in self.instances:
            for cell, group in enumerate(instance.groups):
                ranks, sizes = instance.of.receivers[cell]
                if ranks:
                    senders = group[0] if len(group) == 1 else instance.chosen[cell]
                    bytes_between[senders, ranks] += sizes
        return bytes_between

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the whole plan: equal on ranks that planned alike."""
        settings = (self.trainers, self.workers.plan_of, self.buffer, self.large, self._beside)
        hasher = hashlib.sha256(repr(settings).encode())
        if self._groups is not None:
            hasher.update(self._groups.astype("<i8").tobytes())
        for of in self.classes:
            for plan, taken in of.taken.items():
                hasher.update(repr((plan, of.itemsize)).encode())
                for cell in taken.pieces:
                    one = self._block(taken, cell, of.itemsize)
                    hasher.update(one.rows.astype("<i8").tobytes() + one.writes.astype("<i8").tobytes())
        known: dict[Groups, bytes] = {}
        for instance in self.instances:
            if instance.groups not in known:
                known[instance.groups] = hashlib.sha256(repr(instance.groups).encode()).digest()
            hasher.update(instance.ordinal.to_bytes(8, "little") + known[instance.groups])
            for senders in instance.chosen.values():
                hasher.update(senders.astype("<i8").tobytes())
        return hasher.hexdigest()


def _senders(instance: Instance, cell: int) -> list[int]:
    return instance.chosen[cell].tolist() if cell in instance.chosen else []


def _choose(of: PlanClass, groups: Groups, sent: list[int]) -> dict[int, Integers]:
    """Give each receiver of each cell to the holder that has sent least so far, the lowest rank of equals."""
    chosen: dict[int, Integers] = {}
    for cell, group in enumerate(groups):
        if len(group) == 1:
            sent[group[0]] += of.total[cell]
        elif of.total[cell]:
            heap = [(sent[rank], rank) for rank in group]
            heapq.heapify(heap)
            senders = []
            for nbytes in of.receivers[cell][1]:
                load, rank = heap[0]
                senders.append(rank)
                heapq.heapreplace(heap, (load + nbytes, rank))
            for load, rank in heap:
                sent[rank] = load
            chosen[cell] = np.array(senders, np.int64)
    return chosen


class _Alone:
    """Chooses for one worker that knows nothing of what the others want.

    Of parameters that are laid out alike each next one goes to the next holder, and each next worker begins one
    further: so many parameters, or so many workers, keep all holders equally busy.
    """

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._met: Counter[object] = Counter()

    def choose(self, layout: SourceLayout, of: PlanClass, groups: Groups, sent: list[int]) -> dict[int, Integers]:
        key = (layout.shape, layout.itemsize, layout.owners, layout.mesh_shape, layout.placements)
        turn = self._met[key] + self._ordinal
        self._met[key] += 1
        chosen: dict[int, Integers] = {}
        for cell, group in enumerate(groups):
            sender = group[turn % len(group)]
            sent[sender] += of.total[cell]
            if len(group) > 1 and of.total[cell]:
                chosen[cell] = np.full(len(of.receivers[cell][0]), sender, np.int64)
        return chosen
