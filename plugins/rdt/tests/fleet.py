"""Sharded trainers that speak sharded_rdt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from core.tests import sharded_fleet
from weightwire.deadline import Deadline
from weightwire.source import WeightSource
from weightwire.testing.pool_process import Rank
from weightwire_rdt import cluster, trainer

_STARTING = 100.0


class Trainers(sharded_fleet.Trainers):
    """As there; Ray has started the producers before anything has to be in time."""

    backend = "sharded_rdt"

    def __init__(
        self, ranks: Sequence[Rank], client: Any, make: Callable[..., WeightSource], *arguments: Any, **options: Any
    ) -> None:
        for call in [rank.start(start_producer) for rank in ranks]:
            call.result(_STARTING + 10)
        super().__init__(ranks, client, make, *arguments, **options)


def start_producer(state: dict[str, Any]) -> None:
    """Have Ray start this rank's producer: seconds, while others start theirs."""
    trainer._producer.get(cluster.namespace(), Deadline(_STARTING))
