"""What a worker knows of one of its models beside the weights themselves."""

from __future__ import annotations

from typing import Any

from weightwire.session import Revision
from weightwire.sink import WeightSink

DEFAULT_LABEL = "default"


class Target:
    """A model that updates go to, with what is known of its weights."""

    def __init__(self, model: Any, sink: WeightSink) -> None:
        self.model = model
        self.sink = sink
        self.revision = Revision.fresh()
        self.label = DEFAULT_LABEL
        self.zeroed = False

    @property
    def torn(self) -> bool:
        """Whether only a full update makes the weights fit to read."""
        return self.zeroed or self.sink.torn
