"""How values are written for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def shown_bytes(nbytes: int) -> str:
    """`"1.2 GiB"`."""
    power = min(3, max(0, (abs(nbytes).bit_length() - 1) // 10))
    return f"{nbytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def shown_revision(revision: Any) -> str:
    """`"3f2a91bc/4"`; a dash where there is none."""
    if not isinstance(revision, Mapping) or "lineage" not in revision:
        return "-"
    return f"{str(revision['lineage'])[:8]}/{revision.get('number')}"


def shown_seconds(seconds: float | None) -> str:
    """`"12.3 ms"` or `"4.56 s"`; a dash where there is none."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def shown_change(before: str, after: str) -> str:
    """`"old -> new"`, or the one where nothing changed."""
    return after if before == after else f"{before} -> {after}"
