"""Whether a round can go as a delta: a pure function of what every worker holds and of what this trainer remembers.

What a worker holds is looked up by its revision: the trainer knows which find of its tracker belongs to each revision
that it ever tried to make, committed or not. A delta from the oldest of them on is right for all workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Choice:
    """How a round goes.

    Attributes:
        base: The mark of the oldest weights that a worker holds, for a delta; None for a dense round.
        reason: Why dense, in words; or who missed something that the delta makes up for. Empty where all is as usual.
    """

    base: int | None
    reason: str = ""


def choose(standings: Mapping[int, Any], *, trainers: int, lineage: str, marks: Mapping[int, int]) -> Choice:
    """How a round goes, the same on every trainer rank.

    Args:
        standings: What every member said as the round began, by member rank.
        trainers: How many of them are trainer ranks.
        lineage: That of this trainer's revisions.
        marks: For each revision number that was tried: the find that it contains. Older ones are forgotten.
    """
    if not marks:
        return Choice(None, "the first round of this trainer")
    for rank in range(trainers):
        if why := standings[rank].get("dense"):
            return Choice(None, f"trainer rank {rank}: {why}")
    found: dict[int, int] = {}
    for member, standing in standings.items():
        if member < trainers:
            continue
        label, revision = f"worker rank {member - trainers}", standing.get("revision")
        if revision is None:
            return Choice(None, f"{label} holds torn weights")
        if revision["lineage"] != lineage:
            return Choice(None, f"{label} holds weights that this trainer did not send")
        if revision["number"] not in marks:
            return Choice(None, f"{label} holds revision {revision['number']}, and what changed since is forgotten")
        if standing.get("unpatchable"):
            return Choice(None, f"{label} cannot be patched: {standing['unpatchable']}")
        found[member] = marks[revision["number"]]
    oldest, newest = min(found.values()), max(marks.values())
    behind = [f"worker rank {member - trainers}" for member, mark in found.items() if mark < newest]
    return Choice(oldest, f"{', '.join(behind)} missed a round" if behind else "")
