"""A source whose tensors change, and what a tracker ought to find of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from weightwire.layout import ParamMeta
from weightwire.source import WeightSource, as_bytes
from weightwire.source_check import as_plain
from weightwire_sparse import snapshot, sweep
from weightwire_sparse.changes import Bytes, Changes
from weightwire_sparse.finding import segments
from weightwire_sparse.pieces import AddressSpace
from weightwire_sparse.tracker import DeltaTracker


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a few kilobytes are cut and merged as those of gigabytes are."""
    monkeypatch.setattr(sweep, "_TASK_BYTES", 512)
    monkeypatch.setattr(sweep, "SMALL", 128)
    monkeypatch.setattr(snapshot, "SMALL", 128)


@pytest.fixture
def made() -> Iterator[Callable[..., DeltaTracker]]:
    """Makes trackers, which are shut down in the end."""
    trackers: list[DeltaTracker] = []

    def make(*arguments: Any, **options: Any) -> DeltaTracker:
        trackers.append(DeltaTracker(*arguments, **options))
        return trackers[-1]

    yield make
    for tracker in trackers:
        tracker.shutdown()


def tensors(sizes: dict[str, int], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: torch.arange(size).to(dtype) for name, size in sizes.items()}


class TrackedSource(WeightSource):
    """One rank's pieces of whole tensors, plain, transposed or lazily conjugated.

    Attributes:
        fails_at: After how many tensors a pass raises `error`, if any.
        error: What it raises.
    """

    def __init__(self, metadata: Sequence[ParamMeta], rank: int, random: Random, *, resident: bool) -> None:
        self._metadata, self._rank, self._resident = list(metadata), rank, resident
        self.bases: list[Tensor] = []
        self.tensors: list[Tensor] = []
        for meta in metadata:
            turned = random.random() < 0.3
            shape = tuple(reversed(meta.shape)) if turned else meta.shape
            base = torch.zeros(shape, dtype=meta.dtype)
            self.bases.append(base)
            tensor = base.permute(tuple(reversed(range(base.ndim)))) if turned else base
            self.tensors.append(tensor.conj() if random.random() < 0.3 else tensor)
        self.fails_at: int | None = None
        self.error: BaseException = RuntimeError("the source is gone")
        self.change(random, 1.0)

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return self._metadata

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for count, (name, tensor) in enumerate(self._pairs()):
            if count == self.fails_at:
                raise self.error
            yield name, tensor

    def resident(self) -> tuple[list[str], list[Tensor]] | None:
        if not self._resident or self.fails_at is not None:
            return None
        pairs = list(self._pairs())
        return [name for name, _ in pairs], [tensor for _, tensor in pairs]

    def _pairs(self) -> Iterator[tuple[str, Tensor]]:
        for meta, tensor in zip(self._metadata, self.tensors, strict=True):
            if meta.owned_by(self._rank):
                box, local = meta.box(self._rank), meta.local_shape(self._rank)
                piece = tensor[box.slices()] if not box.empty else torch.empty(local, dtype=meta.dtype)
                yield meta.name, piece if self._resident else piece.clone(memory_format=torch.preserve_format)

    def change(self, random: Random, share: float, names: Sequence[str] | None = None) -> None:
        """Flip a bit in some elements of each tensor."""
        for meta, base in zip(self._metadata, self.bases, strict=True):
            if base.numel() and (names is None or meta.name in names):
                flip(base, random, share)


def flip(tensor: Tensor, random: Random, share: float) -> None:
    """Flip a bit in some elements, as torch's version counter knows."""
    width, generator = tensor.element_size(), np.random.default_rng(random.getrandbits(32))
    chosen = np.flatnonzero(generator.random(tensor.numel()) < share)
    bits = 1 if tensor.dtype == torch.bool else 8
    content = as_bytes(tensor)
    places = torch.from_numpy(chosen * width + generator.integers(0, width, len(chosen)))
    flips = torch.from_numpy((1 << generator.integers(0, bits, len(chosen))).astype(np.uint8))
    content[places] = content[places] ^ flips


def content_of(source: TrackedSource, space: AddressSpace) -> Bytes:
    """The bytes of all pieces, in the order of their addresses."""
    pieces = (source.tensors[piece.place][piece.box.slices()] for piece in space.pieces)
    return np.concatenate([np.empty(0, np.uint8), *(as_bytes(as_plain(one)).numpy() for one in pieces)])


def elements(content: Bytes, space: AddressSpace) -> list[bytes]:
    """Each element of `content` by its address."""
    found, place = [], 0
    for width, start, stop in segments(space):
        for _ in range(start, stop):
            found.append(content[place : place + width].tobytes())
            place += width
    return found


class Truth:
    """What `since` ought to give, worked out from every state seen.

    Args:
        tracker: Its tracker.
        source: The tracker's source.
    """

    def __init__(self, tracker: DeltaTracker, source: TrackedSource) -> None:
        self.tracker, self.source = tracker, source
        self.states: dict[int, list[bytes]] = {}
        self.looked: set[int] = set()
        """Marks of finds before which something was compared ahead, which may find more."""

    def present(self) -> list[bytes]:
        return elements(content_of(self.source, self.tracker.space), self.tracker.space)

    def changed_since(self, mark: int) -> set[int]:
        later = [state for at, state in sorted(self.states.items()) if at >= mark]
        return {
            address
            for before, after in pairwise(later)
            for address, pair in enumerate(zip(before, after, strict=True))
            if pair[0] != pair[1]
        }

    def check(self, mark: int, changes: Changes) -> None:
        """Compare what the tracker found since `mark` with what was to be found."""
        space = self.tracker.space
        found, present = changes.addresses.tolist(), self.states[max(self.states)]
        assert changes.addresses.dtype == np.int64 and changes.values.dtype == np.uint8
        assert all(one < other for one, other in pairwise(found))
        assert changes.values.tobytes() == b"".join(present[address] for address in found)
        assert changes.value_offsets(space)[-1] == len(changes.values)
        expected = self.changed_since(mark)
        assert expected <= set(found)
        if not any(at > mark for at in self.looked):
            assert expected == set(found)
