"""Named points that a test can act on: kill this process here, stop it, raise.

Nothing is installed outside tests, and a point costs one comparison. The names are the vocabulary of the
conformance kit; a transport adds its own as `"<backend>.<point>"`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

POINTS: Final = (
    "trainer.begin",  # begin-n agreed, nothing sent
    "trainer.sent",  # every byte handed over, before finish
    "worker.begin",  # begin-n agreed, nothing received
    "worker.received",  # an update message is received whole
    "worker.vote",  # prepared, gate closed, before the vote
    "worker.voted",  # the vote is unanimous, before commit
    "worker.committed",
    "communicator.connected",
    "communicator.first_piece",  # the first piece of a round has moved
)

_handler: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Say that `point` was reached."""
    if _handler is not None:
        _handler(point)


def install(handler: Callable[[str], None] | None) -> None:
    """Have `handler(point)` called at every point reached in this process; None removes it."""
    global _handler
    _handler = handler
