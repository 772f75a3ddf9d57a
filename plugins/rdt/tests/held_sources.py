"""Sources that stop in the middle of a round until a test lets them go."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from core.tests.sharded_fleet import BoxSource
from weightwire.layout import ParamMeta
from weightwire.source import WeightSource

State = dict[str, Any]
_PATIENCE = 60


class HeldBoxes(BoxSource):
    """Stops before its second parameter while `held` is set."""

    held = False

    def __init__(self, metadata: Sequence[ParamMeta], rank: int) -> None:
        super().__init__(metadata, rank)
        self.reached, self.go = threading.Event(), threading.Event()

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for place, pair in enumerate(super().iter_local()):
            if place == 1 and self.held:
                self.reached.set()
                assert self.go.wait(_PATIENCE)
            yield pair


def held_boxes(state: State, rank: int, count: int, metadata: Sequence[ParamMeta]) -> WeightSource:
    return HeldBoxes(metadata, rank)


def hold(state: State) -> None:
    """Have the next round stop in the middle."""
    source = state["source"]
    source.reached.clear()
    source.go.clear()
    source.held = True


def reached(state: State) -> None:
    """Wait until the round has stopped."""
    assert state["source"].reached.wait(_PATIENCE)


def let_go(state: State) -> None:
    """Have it go on, and the next one not stop."""
    state["source"].held = False
    state["source"].go.set()
