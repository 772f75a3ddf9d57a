"""A plan's report as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from weightwire_m2n.plan_report import Loads, PlanReport, shown_bytes, shown_ranks, shown_seconds

_MOST_ROWS: Final = 16


def text(found: PlanReport) -> str:
    """The report for a person: a summary, both sides, and what the load plans leave open."""
    parts = [list(_summary(found))]
    parts.append(_table(("TRAINER RANK", "SENDS", "SHARE"), _by_rank(found.sent), right=(0, 1, 2)))
    parts.append(_table(("WORKER RANK", "RECEIVES", "SHARE"), _by_rank(found.received), right=(0, 1, 2)))
    parts.append(_table(("NOBODY TAKES",), [(name,) for name in found.unclaimed]))
    opaque = [
        (shown_ranks(each.workers), one.module or "(the model)", shown_bytes(one.nbytes), one.reason)
        for each in found.loads
        for one in each.opaque
    ]
    parts.append(_table(("WORKER RANKS", "TAKES TENSORS IN FULL", "BYTES", "BECAUSE"), opaque))
    parts.append(_table(("WORKER RANKS", "NOTHING WRITES", "ELEMENTS"), list(_unfilled(found.loads))))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _summary(found: PlanReport) -> Iterator[str]:
    yield (
        f"{_count(len(found.sent), 'trainer rank')} to {_count(len(found.received), 'worker rank')}: "
        f"{_count(found.parameters, 'parameter')}, {shown_bytes(found.parameter_bytes)}; "
        f"{_count(found.classes, 'class', 'classes')}, planned in {shown_seconds(found.planning_seconds)}"
    )
    yield ""
    yield f"on the wire       {shown_bytes(found.wire)}, {found.ratio:.4f} times the lower bound"
    yield f"estimated         {shown_seconds(found.estimated_seconds)} at {found.speed:g} GiB/s a rank"
    if found.busiest is not None:
        sender, receiver = (max(range(len(side)), key=side.__getitem__) for side in (found.sent, found.received))
        yield f"busiest sender    trainer rank {sender}, {shown_bytes(found.sent[sender])}"
        yield f"busiest receiver  worker rank {receiver}, {shown_bytes(found.received[receiver])}"
        yield (
            f"busiest link      {found.busiest.trainer} to {found.busiest.worker}, {shown_bytes(found.busiest.nbytes)} "
            f"in {_count(found.busiest.messages, 'message')}; {_count(found.links, 'link')} in use"
        )
    if found.opaque_bytes:
        yield f"in full           {shown_bytes(found.opaque_bytes)} of it, for modules that cannot be recorded"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _by_rank(nbytes: Sequence[int]) -> list[tuple[str, str, str]]:
    """Most bytes first."""
    total = sum(nbytes) or 1
    order = sorted(range(len(nbytes)), key=lambda rank: -nbytes[rank])
    return [(str(rank), shown_bytes(nbytes[rank]), f"{nbytes[rank] / total:.1%}") for rank in order]


def _unfilled(loads: Sequence[Loads]) -> Iterator[tuple[str, str, str]]:
    for each in loads:
        for target, elements in each.unfilled:
            yield shown_ranks(each.workers), target, f"{elements:,}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()) -> list[str]:
    """Aligned columns; nothing where there are no rows."""
    if not rows:
        return []
    shown = [head, *rows[:_MOST_ROWS]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = []
    for row in shown:
        cells = zip(row, widths, strict=True)
        padded = [cell.rjust(width) if k in right else cell.ljust(width) for k, (cell, width) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    more = len(rows) - _MOST_ROWS
    return lines if more <= 0 else [*lines, f"... {more:,} more"]
