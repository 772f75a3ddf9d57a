"""How what has come in an update becomes what a commit does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weightwire import staging
from weightwire.inventory import Group, Inventory, Views
from weightwire.module_patching import memory_of, ready_in
from weightwire.module_update import Plan, Rebind, Update
from weightwire.patching import CheckedPatch
from weightwire.staging_area import StagingArea


class Closing:
    """The end of one update.

    Args:
        update: What has come.
        area: Where it lies.
        inventory: The model.
        patches: What changes in some elements, of the model's dtypes.
        copied_because: Why a group is copied instead of rebound; None if it is not.
        in_place: What came into live memory is there already.
    """

    def __init__(
        self,
        update: Update,
        area: StagingArea,
        inventory: Inventory,
        patches: Sequence[CheckedPatch],
        copied_because: Callable[[Group], str | None],
        *,
        in_place: bool,
    ) -> None:
        self._update = update
        self._area = area
        self._inventory = inventory
        self._patches = patches
        self._copied_because = copied_because
        self._in_place = in_place

    def plan(self) -> Plan:
        """What commit does."""
        plan = Plan()
        if not self._in_place:
            self._add_staged(plan)
        self._add_adopted(plan)
        self._add_buffers(plan)
        self._add_patches(plan)
        return plan

    def _add_staged(self, plan: Plan) -> None:
        """Make every staged storage whole, and rebind to it or copy from it."""
        written: dict[Group, list[str]] = {}
        for name in self._update.filled():
            group = self._update.chosen[name][0].group
            if group is not None:
                written.setdefault(group, []).append(name)
        for group, names in written.items():
            views, reason = self._area.stage(self._update, group), self._copied_because(group)
            entries = [self._update.chosen[name][0] for name in names]
            if reason is None and not group.adopted:
                unbuffered = [
                    entry for entry, name in zip(entries, names, strict=True) if name not in self._update.buffers
                ]
                covered = [views.tensors[entry.index] for entry in unbuffered]
                plan.partial |= staging.copy_uncovered(group.storage, views.storage, covered)
            for entry, name in zip(entries, names, strict=True):
                if name in self._update.buffers:
                    views.tensors[entry.index].copy_(self._update.buffers[name])
            if reason is None:
                plan.add(Rebind(group, views, entries), self._inventory.known_users(group))
            else:
                plan.copies += [(entry, views.tensors[entry.index], reason) for entry in entries]

    def _add_adopted(self, plan: Plan) -> None:
        for name, tensor in self._update.adopted.items():
            entry, storage = self._update.chosen[name][0], tensor.untyped_storage()
            group = entry.group
            assert group is not None
            view = staging.view_like(entry.tensors[0], storage, offset=int(tensor.storage_offset()))
            rebind = Rebind(group, Views(storage, [view], ours=False), [entry], adopted=True)
            plan.add(rebind, self._inventory.known_users(group))

    def _add_buffers(self, plan: Plan) -> None:
        """Buffers that no staged storage has taken are copied into live memory."""
        for name in self._update.filled():
            entry, _ = self._update.chosen[name]
            if name in self._update.buffers and (entry.group is None or self._in_place):
                reason = entry.copied_because or "strided or cast in place"
                plan.copies.append((entry, self._update.buffers[name], reason))

    def _add_patches(self, plan: Plan) -> None:
        """Patches go into live memory at commit, except where that is about to be replaced by what is staged."""
        replaced = {rebind.group: rebind for rebind in plan.rebinds}
        for patch in self._patches:
            entry = self._update.chosen[patch.name][0]
            rebind = None if entry.group is None else replaced.get(entry.group)
            if rebind is None:
                for ready in ready_in(patch, entry, memory_of(entry)):
                    ready.make_room()
                    plan.patches.append(ready)
            else:
                for ready in ready_in(patch, entry, rebind.views.tensors[entry.index]):
                    ready.apply()
                rebind.patched.append(entry)
