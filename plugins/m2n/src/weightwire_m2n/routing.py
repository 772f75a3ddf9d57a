"""Data-plane ranks that both sides of a pair derive alike."""

from __future__ import annotations

from collections.abc import Sequence

from weightwire.fleet import Fleet


def routes(pairs: Sequence[tuple[int, int]], fleet: Fleet) -> list[tuple[int, int]]:
    """The pairs of a trainer rank and a worker rank between which bytes move, as data-plane ranks."""
    return [(fleet.senders.index(sender), fleet.rank_offset + worker) for sender, worker in pairs]
