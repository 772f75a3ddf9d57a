"""The bar of a transfer, silent where standard error is no terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from weightwire.layout import ParamMeta
from weightwire.report import GIB, ProgressEvent
from weightwire_cli.shown import shown_bytes

_SECONDS = 0.05
"""Between two looks at what has been sent: there may be tens of thousands of parameters."""


class _Amount(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{shown_bytes(int(task.completed))} of {shown_bytes(int(task.total or 0))}")


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed / GIB:.2f} GiB/s" if speed else "- GiB/s")


class TransferProgress:
    """Shows phase, parameters, bytes and GiB/s while a `with` statement runs.

    Args:
        console: Where to.
        metadata: What is sent.
    """

    def __init__(self, console: Console, metadata: Sequence[ParamMeta]) -> None:
        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[parameters]} of {task.fields[of]} parameters"),
            _Amount(),
            _Speed(),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        total = sum(meta.nbytes for meta in metadata)
        self._fields: dict[str, Any] = {"parameters": 0, "of": len(metadata)}
        self._task = self._bar.add_task("", total=total, **self._fields)
        self._shown = 0.0

    def phase(self, name: str) -> None:
        """Say what is being done."""
        self._bar.update(self._task, description=name, refresh=True)

    def event(self, event: ProgressEvent) -> None:
        """Take what an engine tells."""
        if event.phase != "transfer":
            if event.phase == "begin":
                self._bar.reset(self._task, **self._fields)  # it may be another attempt
            self.phase(event.phase)
            return
        now = time.monotonic()
        if now - self._shown >= _SECONDS or event.bytes_done == event.bytes:
            self._shown = now
            self._bar.update(
                self._task, description="transfer", completed=event.bytes_done, parameters=event.parameters_done
            )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
