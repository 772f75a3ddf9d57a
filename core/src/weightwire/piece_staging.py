"""Where the pieces of an update wait until all of them are here and the model's own loader is fed with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from weightwire import staging
from weightwire.load_plan import LoadPlan
from weightwire.plan_building import plan_of_pieces
from weightwire.plan_patching import PatchRoutes
from weightwire.recorded_install import feed, from_pieces


class PieceStaging:
    """Memory for what a recorded loader needs, kept from one update to the next.

    Args:
        recorded: What the loader does.
        device: Where the memory is.

    Attributes:
        recorded: As given.
        plan: Where the pieces land in `memory`, see `plan_of_pieces`.
        routes: Where elements of the sources land in it.
        allocated_bytes: Allocated since the owner last set it to 0.
    """

    def __init__(self, recorded: LoadPlan, device: torch.device) -> None:
        self.recorded = recorded
        self.plan = plan_of_pieces(recorded)
        self.routes = PatchRoutes(self.plan.copies)
        self.allocated_bytes = 0
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def memory(self) -> dict[str, Tensor]:
        """A flat tensor for each target of the plan, to receive into; allocated when it is first asked for."""
        if not self._memory:
            with torch.inference_mode(False):  # it may be written in any mode
                self._allocate()
        for flat in self._memory.values():
            staging.poison(flat.untyped_storage())
        return self._memory

    def _allocate(self) -> None:
        slab = staging.Slab()
        sizes = [target.size * target.dtype.itemsize for target in self.plan.targets]
        left = staging.slab_bytes(sizes)
        for target, nbytes in zip(self.plan.targets, sizes, strict=True):
            if nbytes and self._device.type == "cpu":
                storage = slab.cut(nbytes, lambda left=left: left)  # type: ignore[misc]
            else:
                storage = staging.allocate(nbytes, self._device)
            left -= staging.slab_bytes([nbytes])
            self._memory[target.name] = torch.empty(0, dtype=target.dtype, device=self._device).set_(storage)
            self.allocated_bytes += nbytes

    @property
    def held(self) -> Mapping[str, Tensor]:
        """What came last, or nothing, in tensors as those of `memory`."""
        return self._memory

    def forget(self) -> None:
        """Never hand this memory out again: late bytes may still arrive in it."""
        self._memory = {}

    def feed(
        self, load: Callable[[Iterable[tuple[str, Tensor]]], object], device: torch.device, *, keep: bool = False
    ) -> None:
        """Call the loader with what came.

        Args:
            load: The loader that was recorded.
            device: Where its stand-ins claim to be.
            keep: What came is needed again: the loader, which may write into what it gets in full, gets copies.

        Raises:
            UpdateRefused: The loader asks for what it did not use when it was recorded.
            Exception: Whatever else the loader raises.
        """
        flat = iter(self._memory[target.name] for target in self.plan.targets)
        pieces = dict(zip(self.recorded.pieces, itertools.islice(flat, len(self.recorded.pieces)), strict=True))
        names = self.recorded.full_sources
        full = {name: one.view(self.recorded.by_name[name].shape) for name, one in zip(names, flat, strict=True)}

        def own(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in pairs:
                yield name, tensor.clone() if name in full else tensor

        loader = (lambda pairs: load(own(pairs))) if keep else load
        feed(self.recorded, loader, from_pieces(pieces), full, device=device)
