"""Taking a snapshot while somebody else goes over the source."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from weightwire.source_check import as_plain
from weightwire_sparse.pieces import AddressSpace
from weightwire_sparse.sweep import Sweep


class Taking:
    """A snapshot under way; see `DeltaTracker.taking`.

    Args:
        space: The pieces it is of.
        sweep: Copies them; None where no snapshot is held.
        finished: Called by `done`; gives the mark.
    """

    def __init__(self, space: AddressSpace, sweep: Sweep | None, finished: Callable[[Taking], int]) -> None:
        self._space, self._sweep, self._finished = space, sweep, finished
        self._missing = set(space.by_place) if sweep is not None else set()

    def piece(self, place: int, tensor: Tensor) -> None:
        """Take what this rank holds of the parameter at `place` of the metadata; nothing if it does not send it.

        The tensor must not change until `done`.

        Raises:
            Exception: What copying an earlier one raised.
        """
        if self._sweep is not None and place in self._missing:
            self._sweep.add(self._space.by_place[place], as_plain(tensor.detach()))
            self._missing.remove(place)

    def done(self) -> int:
        """Wait until all is copied, which must have been given.

        Returns:
            The mark of what is there now.

        Raises:
            Exception: What copying raised. There is no snapshot then.
        """
        return self._finished(self)

    def complete(self) -> None:
        """Wait for the copies."""
        if self._sweep is not None:
            self._sweep.finish()
        assert not self._missing, f"the parameters at {sorted(self._missing)} were not given"

    def abandon(self) -> None:
        """Copy nothing more."""
        if self._sweep is not None:
            self._sweep.abandon()
        self._sweep = None
