"""What a server of several ranks says of itself, from what each rank says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

_UPDATES = ("none", "open", "receiving", "committing")


def merged_info(
    ranks: Mapping[int, Mapping[str, Any]],
    absent: Mapping[int, str],
    *,
    pids: Mapping[int, int],
    torn: str | None,
    gate: str,
    world_size: int,
) -> dict[str, Any]:
    """The state of the worst rank, and each rank's own under `ranks`.

    Args:
        ranks: Rank to its `Worker.info`.
        absent: Rank to why it does not answer.
        pids: Rank to its process, of those that have joined.
        torn: Why the ranks' weights do not belong together, if they do not.
        gate: State of the front's gate.
        world_size: Ranks of the server.
    """
    infos = [ranks[rank] for rank in sorted(ranks)]
    update = max((info["update"] for info in infos), key=_UPDATES.index, default="none")
    whole = torn is None and all(info["weights"] == "whole" for info in infos)
    up = not absent and all(info["link"] == "up" for info in infos)
    if absent:
        state = "lost"
    elif update != "none":
        state = "updating"
    else:
        state = "torn" if not whole else "ready" if up else "uninitialised"
    return {
        "weight_version": _common([info["weight_version"] for info in infos]) or "mixed",
        "revision": _revision([info["revision"] for info in infos]),
        "state": state,
        "update": update,
        "update_id": next((info["update_id"] for info in infos if info["update_id"] is not None), None),
        "weights": "whole" if whole else "torn",
        "link": "up" if up else "down",
        "gate": gate,
        "backend": _common([info["backend"] for info in infos]),
        "rank": None,
        "world_size": world_size,
        "cast": all(info["cast"] for info in infos),
        "last_transfer": _last([info["last_transfer"] for info in infos]),
        "reason": "; ".join(absent.values()) or torn,
        "ranks": [
            {**(ranks.get(rank) or {"rank": rank, "state": "lost", "reason": absent[rank]}), "pid": pids.get(rank)}
            for rank in range(world_size)
        ],
    }


def _last(transfers: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    """The bytes of all ranks together, in the time of the slowest; None unless all have had a transfer."""
    present = [transfer for transfer in transfers if transfer is not None]
    if not present or len(present) < len(transfers):
        return None
    return {
        "bytes": sum(transfer["bytes"] for transfer in present),
        "seconds": max(transfer["seconds"] for transfer in present),
        "at": max(transfer["at"] for transfer in present),
    }


def _common(values: Sequence[Any]) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else None


def _revision(revisions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ranks' common revision; where each has its own, one that stands for all of them together."""
    if (common := _common(revisions)) is not None:
        return dict(common)
    words = " ".join(f"{revision['lineage']}/{revision['number']}" for revision in revisions)
    return {"lineage": hashlib.sha256(words.encode()).hexdigest()[:32], "number": 0}
