"""One rank's share of a plan, kept from link to link for as long as nothing that it follows from has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from weightwire.layout import ParamMeta, metadata_digest
from weightwire.load_plan import LoadPlan
from weightwire.resharding.load_plans import workers_of
from weightwire.resharding.planner import Coverage, Plan
from weightwire.resharding.source_layout import SourceLayout
from weightwire_m2n.messages import message_bytes


class Sizes(Protocol):
    """The settings that a plan depends on, of an init info of either side."""

    buffer_bytes: int
    num_buffers: int
    direct_bytes: int


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Share(Generic[T]):
    """What one rank needs of a plan.

    Attributes:
        digest: Of the whole plan.
        part: Its own messages.
        pairs: The trainer ranks and worker ranks between which bytes move.
        coverage: What is wanted of the metadata.
    """

    digest: str
    part: T
    pairs: tuple[tuple[int, int], ...]
    coverage: Coverage


def make_plan(metadata: Sequence[ParamMeta], trainers: int, load_plans: Sequence[LoadPlan], sizes: Sizes) -> Plan:
    """Who sends what to whom: the same on every rank that is given the same."""
    most = message_bytes(sizes.buffer_bytes, sizes.num_buffers, len(load_plans))
    layouts = [SourceLayout.of(meta) for meta in metadata]
    return Plan(layouts, trainers, workers_of(load_plans, metadata), buffer=most, large=min(sizes.direct_bytes, most))


class Shares(Generic[T]):
    """Makes the share of one rank, and keeps the last one.

    Args:
        part: Takes the messages of a rank out of a plan.

    Attributes:
        made: How many were made.
    """

    def __init__(self, part: Callable[[Plan, Sequence[ParamMeta], int], T]) -> None:
        self._part = part
        self._key: tuple[object, ...] = ()
        self._share: Share[T] | None = None
        self.made = 0

    def get(
        self,
        metadata: Sequence[ParamMeta],
        trainers: int,
        load_plans: Sequence[LoadPlan],
        sizes: Sizes,
        rank: int,
    ) -> Share[T]:
        """The share that follows from these.

        Args:
            metadata: The parameters.
            trainers: How many trainer ranks there are.
            load_plans: What each worker rank loads.
            sizes: Settings, the same on every rank.
            rank: This trainer rank or worker rank.

        Raises:
            MetadataError: A worker wants what is not there.
        """
        settings = sizes.buffer_bytes, sizes.num_buffers, sizes.direct_bytes
        digests = tuple(plan.digest() for plan in load_plans)
        key = (metadata_digest(metadata), trainers, digests, settings, rank)
        if self._share is None or self._key != key:
            plan = make_plan(metadata, trainers, load_plans, sizes)
            pairs = tuple(
                (int(sender), int(worker)) for sender, worker in zip(*np.nonzero(plan.traffic()), strict=True)
            )
            self._share = Share(plan.digest, self._part(plan, metadata, rank), pairs, plan.coverage)
            self._key = key
            self.made += 1
        return self._share
