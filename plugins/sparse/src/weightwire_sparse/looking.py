"""Comparing parameters before the next find, while others still change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from weightwire.source_check import is_plain
from weightwire_sparse.changes import Changes
from weightwire_sparse.sweep import Sweep


class LookAhead:
    """What is compared between two finds, a few megabytes at a time.

    Args:
        resident: Gives the present tensor of each piece, by its number; nothing where they are not there all the time.
        sweep: Makes a sweep that compares and never waits.
    """

    def __init__(self, resident: Callable[[], Mapping[int, Tensor]], sweep: Callable[[], Sweep]) -> None:
        self._resident, self._sweep = resident, sweep
        self._tensors: Mapping[int, Tensor] | None = None
        # With a tensor over the same memory, which therefore cannot be given to another one meanwhile.
        self._seen: dict[int, tuple[Tensor, int] | None] = {}
        self._sweeping: Sweep | None = None

    def look(self, numbers: Iterable[int]) -> None:
        """Begin to compare pieces; those of which it was said before are left to `find`."""
        if self._tensors is None:
            self._tensors = self._resident()
        if self._sweeping is None:
            self._sweeping = self._sweep()
        for number in numbers:
            tensor = self._tensors.get(number)
            if number in self._seen or tensor is None or not _can_be_watched(tensor):
                continue
            self._seen[number] = None
            kept, version = tensor.detach(), tensor._version
            self._sweeping.add(number, kept)
            self._seen[number] = kept, version

    def finish(self) -> list[Changes]:
        """Wait for all of it; what was found.

        Raises:
            Exception: What the work on one part raised.
        """
        return [] if self._sweeping is None else self._sweeping.finish()

    def abandon(self) -> None:
        """End it; what was found does not matter."""
        if self._sweeping is not None:
            self._sweeping.abandon()

    def touched(self, number: int) -> bool:
        """Whether any of a piece was compared."""
        return number in self._seen

    def stands(self, number: int, tensor: Tensor) -> bool:
        """Whether what was compared of a piece is what `tensor` holds now."""
        seen = self._seen.get(number)
        if seen is None or not _can_be_watched(tensor):
            return False
        kept, version = seen
        return tensor.data_ptr() == kept.data_ptr() and tensor._version == version


def _can_be_watched(tensor: Tensor) -> bool:
    """Whether its memory is read in place, and torch counts what is written to it."""
    return tensor.device.type == "cpu" and not tensor.is_inference() and is_plain(tensor)
