"""What the patches of an update are checked for, and changing some elements of live memory and taking it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightwire.errors import UpdateRefused
from weightwire.layout import Box, ParamMeta
from weightwire.sink import Patch

TORN = "the weights here are torn: only a full update without patches makes them whole again"

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """`tensor` as integers of its width, which every operation moves as they are; complex128 stays what it is."""
    width = _BITS.get(tensor.dtype.itemsize)
    return tensor if width is None else tensor.view(width)


Exchange = Callable[[Sequence["ReadyPatch"]], "list[ReadyPatch]"]
"""Applies patches that have nothing in common, in any order: `room` gets what was there and becomes `before`.

Returns those that it does not know how to apply, with which it has done nothing. It does not raise.
"""

_exchanges: list[Exchange] = []


def offer_exchange(exchange: Exchange) -> None:
    """Have the patches of this process applied by `exchange`, for who has a faster way than torch's operations."""
    _exchanges[:] = [exchange]


@dataclass(slots=True, eq=False)
class ReadyPatch:
    """Values for some elements of one memory; all that `apply` does is to exchange them.

    Attributes:
        memory: Where to, flat; with no `offsets` a view of exactly what is written.
        offsets: Indices into `memory`, each once; None is all of it.
        values: As many.
        again: Whether it may be of elements that an earlier one is of, and so comes after that.
        before: What was there, once it has been applied.
        room: Where that goes.
    """

    memory: Tensor
    offsets: Tensor | None
    values: Tensor
    again: bool = False
    before: Tensor | None = None
    room: Tensor | None = None

    def make_room(self) -> None:
        """Allocate what `apply` needs, so that it does nothing that is likely to fail."""
        self.room = torch.empty_like(self.values)

    def apply(self) -> None:
        """Write the values, and keep what was there."""
        if self.room is None:
            self.make_room()
        memory, offsets, values, room = self.memory, self.offsets, self.values, self.room
        assert room is not None
        if offsets is None:
            self.before = room.copy_(memory)
            memory.copy_(values)
        else:
            self.before = torch.gather(memory, 0, offsets, out=room)
            memory.scatter_(0, offsets, values)

    def undo(self) -> None:
        """Write back what `apply` found, if it came to that."""
        if self.before is None:
            return
        if self.offsets is None:
            self.memory.copy_(self.before)
        else:
            self.memory.scatter_(0, self.offsets, self.before)


def apply_all(patches: Sequence[ReadyPatch]) -> None:
    """Apply all, which have room. An error undoes them."""
    first = [patch for patch in patches if not patch.again]
    try:
        for exchange in _exchanges:
            first = exchange(first)
        for patch in first:
            patch.apply()
        for patch in patches:
            if patch.again:
                patch.apply()
    except BaseException:
        undo_all(patches)
        raise


def undo_all(patches: Sequence[ReadyPatch]) -> None:
    """Write back what was there before; what has not been applied is left as it is."""
    for again in (True, False):
        for patch in reversed(patches):
            if patch.again == again:
                patch.undo()


@dataclass(frozen=True, slots=True, eq=False)
class CheckedPatch:
    """A patch that fits its parameter.

    Attributes:
        name: The parameter.
        shape: Its full shape.
        box: The part of it that `positions` count in; None if that is all of it.
        positions: int64 and ascending; None is every element of the box.
        values: As many, contiguous.
        again: Whether the parameter has been patched in an earlier call of the update.
    """

    name: str
    shape: tuple[int, ...]
    box: Box | None
    positions: Tensor | None
    values: Tensor
    again: bool = False


def check_patch(patch: Patch, meta: ParamMeta, *, again: bool = False) -> CheckedPatch:
    """Compare a patch with what was announced; `again` as in `CheckedPatch`.

    Raises:
        UpdateRefused: The box is not in the parameter; positions are not 1-D int32 or int64, out of range or repeated;
            there are not as many values; their dtype is another one.
    """
    positions, values, box = patch.positions, patch.values, patch.box
    if box is not None and not _inside(box, meta.shape):
        raise _refusal(patch, f"is of a box from {box.start} to {box.stop}, in a parameter of shape {meta.shape}")
    numel = meta.numel if box is None else box.numel
    if positions is None:
        if values.shape != (numel,):
            raise _refusal(patch, f"has values of shape {tuple(values.shape)} for all of {numel} elements")
    elif positions.dtype not in (torch.int32, torch.int64) or positions.dim() != 1:
        words = f"needs 1-D int32 or int64 positions, not {tuple(positions.shape)} of {positions.dtype}"
        raise _refusal(patch, words)
    elif values.shape != positions.shape:
        raise _refusal(patch, f"has {positions.numel()} positions for values of shape {tuple(values.shape)}")
    if values.dtype != meta.dtype:
        raise _refusal(patch, f"has values of {values.dtype}, and was announced as {meta.dtype}")
    values = values.detach().resolve_conj().resolve_neg().contiguous()
    if values.data_ptr() % values.element_size():
        # Torch's kernels, copying ones too, take for granted that a complex128 lies at a multiple of 16.
        values = values.view(torch.uint8).clone().view(values.dtype)
    if positions is not None:
        positions, values = _ascending(patch, positions.detach().to(torch.int64), values, numel)
    part = None if box is None or box.shape == meta.shape else box
    return CheckedPatch(patch.name, meta.shape, part, positions, values, again)


def _refusal(patch: Patch, words: str) -> UpdateRefused:
    return UpdateRefused(f"the patch of {patch.name!r} {words}", parameter=patch.name)


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.stop) == len(shape) and all(stop <= size for stop, size in zip(box.stop, shape, strict=True))


def _ascending(patch: Patch, positions: Tensor, values: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Positions in range and in order, each once, and their values."""
    if not positions.numel():
        return positions, values
    if not patch.ascending and not bool((positions[1:] > positions[:-1]).all()):
        positions, order = positions.sort()
        repeated = positions[1:][positions[1:] == positions[:-1]]
        if repeated.numel():
            raise _refusal(patch, f"names position {int(repeated[0])} twice")
        values = bits(values).index_select(0, order.to(values.device)).view(values.dtype)
    first, last = int(positions[0]), int(positions[-1])
    if first < 0 or last >= numel:
        raise _refusal(patch, f"names position {first if first < 0 else last} of {numel} elements")
    return positions, values


@dataclass(eq=False, slots=True)
class HeldPatches:
    """What `patch` and `keep` have brought in one update.

    Attributes:
        patches: In the order in which they came, and whether their parameters had come before.
        names: The parameters that they are of.
        kept: The names that keep their values.
    """

    patches: list[tuple[Patch, bool]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    _checked: list[CheckedPatch] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.names or self.kept)

    def add(self, patches: Iterable[Patch], arrive: Callable[[str], None]) -> None:
        """Take what one call of `patch` brings.

        Args:
            patches: All of the update.
            arrive: Notes that a parameter has come; raises if it had come before.

        Raises:
            UpdateRefused: One came by another way, or twice in this call.
        """
        boxes: dict[str, list[Box | None]] = {}
        for patch in patches:
            boxes.setdefault(patch.name, []).append(patch.box)
            self.patches.append((patch, patch.name in self.names))
        for name, several in boxes.items():
            if name not in self.names:
                arrive(name)
            if _overlap(several):
                words = f"{name!r} came twice in one call of patch(), in parts that overlap"
                raise UpdateRefused(words, parameter=name)
        self.names |= boxes.keys()

    def keep(self, names: Iterable[str], arrive: Callable[[str], None]) -> None:
        """Note that `names` keep their values; see `add`."""
        for name in names:
            arrive(name)
            self.kept.add(name)

    def checked(self, expected: Mapping[str, ParamMeta]) -> list[CheckedPatch]:
        """All patches, compared with what was announced; what had been compared before is not looked at again.

        Raises:
            UpdateRefused: One does not fit.
        """
        for patch, again in self.patches[len(self._checked) :]:
            self._checked.append(check_patch(patch, expected[patch.name], again=again))
        return self._checked


def _overlap(boxes: Sequence[Box | None]) -> bool:
    """Whether two boxes have an element in common; those that do not fit each other are refused elsewhere."""
    if len(boxes) > 1 and None in boxes:
        return True
    active: list[Box] = []
    for box in sorted((box for box in boxes if box is not None and not box.empty), key=lambda box: box.start):
        active = [one for one in active if one.stop[:1] > box.start[:1] or not box.start]
        if any(len(one.start) == len(box.start) and not one.intersect(box).empty for one in active):
            return True
        active.append(box)
    return False
