"""Data-plane ranks and numbers that both sides of a pair derive alike."""

from __future__ import annotations

from collections.abc import Sequence

from weightwire.fleet import Fleet


def routes(pairs: Sequence[tuple[int, int]], fleet: Fleet) -> list[tuple[int, int]]:
    """The pairs of a trainer rank and a worker rank between which bytes move, as data-plane ranks."""
    return [(fleet.senders.index(sender), fleet.rank_offset + worker) for sender, worker in pairs]


def message_number(sender: int, worker: int, ordinal: int) -> int:
    """What a message is called in checksums."""
    return (sender << 64) + (worker << 32) + ordinal


def receiving_worker(number: int) -> int:
    """The worker rank that message `number` went to."""
    return number >> 32 & 0xFFFFFFFF
