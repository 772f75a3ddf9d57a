"""The sink of a plain `nn.Module`: staged per storage, made live by rebinding."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from weightwire import module_patching, staging
from weightwire.dtensor import reshard
from weightwire.errors import TransferAborted, UpdateRefused
from weightwire.inventory import Entry, Group, Inventory, check_tensor
from weightwire.layout import ParamMeta
from weightwire.load_plan import LoadPlan
from weightwire.module_closing import Closing
from weightwire.module_update import Chosen, Plan, Rebind, Repetition, Update, check_complete, repetition
from weightwire.patching import TORN
from weightwire.plan_building import plan_of_boxes
from weightwire.scan import scan
from weightwire.sink import CommitMode, CommitReport, Held, Patch, Staging, UpdateSpec, WeightSink
from weightwire.staging_area import StagingArea


class ModuleSink(WeightSink):
    """The sink of a plain `nn.Module`.

    Staged weights lie in a second storage for every storage of the model that an update touches. Commit rebinds all
    parameters and buffers over such a storage to the second one (`tensor.data = ...`), so it costs O(parameters), and
    the first one is received into next time. Only storage allocated here is received into again. What a rebind cannot
    reach is copied under the gate: DTensors (FSDP2), storages of which somebody holds a view, shared memory.

    It does not keep `model` alive, and is for one thread at a time, except that `abort` may come from another.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"load", "targets", "adopt", "patch"})

    def __init__(
        self,
        model: nn.Module,
        *,
        staging: Staging = "staged",
        strict: bool = True,
        cast: bool = False,
        commit: CommitMode = "swap",
    ) -> None:
        super().__init__(staging=staging, strict=strict, cast=cast, commit=commit)
        self._model = weakref.ref(model)
        reshard(model)
        self._inventory = scan(model)
        self._resolved: tuple[UpdateSpec, dict[str, Chosen]] | None = None
        self._area = StagingArea()
        self._update: Update | None = None
        self._last: Repetition | None = None
        self._damaged: set[Entry] = set()
        self._planned: tuple[tuple[Inventory, tuple[ParamMeta, ...]], dict[str, Chosen], LoadPlan] | None = None

    @property
    def allocated_bytes(self) -> int:
        """Bytes of staging allocated since the last `begin`."""
        return self._area.allocated_bytes

    # Opening an update

    def begin(self, spec: UpdateSpec) -> None:
        """See `WeightSink.begin`."""
        assert self._update is None, "the previous update was neither committed nor aborted"
        model = self._live_model()
        refuse_frozen(model)
        if not self._inventory.unchanged():
            self._look_again(model)
        if self._resolved is None or self._resolved[0] != spec:
            full = spec.scope == "full"
            chosen = self._inventory.resolve(spec.metadata, strict=self.strict, cast=self.cast, full=full)
            self._resolved = spec, chosen
        chosen = self._resolved[1]
        if self._torn:
            self._refuse_half_repair(chosen)
        unknown = set() if self.strict else {meta.name for meta in spec.metadata} - chosen.keys()
        self._area.allocated_bytes = 0
        self._update = Update(chosen, frozenset(unknown))
        if self._last is not None:
            self._last.offer(self._update)
        if staging.POISON and self._update.repeated is not None:
            for rebind in self._update.repeated.rebinds:
                self._area.stage(self._update, rebind.group)

    def _look_again(self, model: nn.Module) -> None:
        self._inventory = scan(model, self._inventory)
        self._resolved = self._last = None
        self._area.clear()

    def _refuse_half_repair(self, chosen: Mapping[str, Chosen]) -> None:
        """Torn weights need an update that brings every parameter, and every buffer that was half written."""
        brought = {entry for entry, _ in chosen.values()}
        lacking = [
            entry.names[0]
            for entry in self._inventory.entries
            if (entry.parameter or entry in self._damaged) and entry not in brought
        ]
        if lacking:
            words = f"the weights are torn, and this update lacks {len(lacking)} names, such as {lacking[0]!r}"
            raise UpdateRefused(words, parameter=lacking[0])

    def _live_model(self) -> nn.Module:
        model = self._model()
        assert model is not None, "a sink is used while its model lives"
        return model

    def _open(self) -> Update:
        assert self._update is not None, "begin comes first"
        assert self._update.plan is None, "nothing comes in after prepare"
        return self._update

    # Ways in

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `WeightSink.load`."""
        update = self._open()
        if isinstance(pairs, Sequence) and self._load_together(update, pairs):
            return
        with self._inventory.writing():
            for name, tensor in pairs:
                if self._update is not update:
                    raise TransferAborted("the update was aborted while weights were being loaded")
                if chosen := update.find(name):
                    check_tensor(name, chosen[1], tensor)
                    update.arrive(name)
                    self._put(update, name, chosen, tensor)

    def _load_together(self, update: Update, pairs: Sequence[tuple[str, torch.Tensor]]) -> bool:
        """Copy all with one call, which costs much less than thousands, if each has its place already."""
        names, tensors = [name for name, _ in pairs], [tensor for _, tensor in pairs]
        targets = [target for name in names if (target := update.landing.get(name)) is not None]
        if (
            len(targets) < max(1, len(names))
            or [target.shape for target in targets] != [tensor.shape for tensor in tensors]
            or [target.dtype for target in targets] != [tensor.dtype for tensor in tensors]
        ):
            return False
        update.arrive_all(names)
        with self._inventory.writing():
            torch._foreach_copy_(targets, tensors)
        return True

    def _put(self, update: Update, name: str, chosen: Chosen, tensor: torch.Tensor) -> None:
        """Copy `tensor` to where commit takes it from, or in place."""
        entry, meta = chosen
        if (target := update.landing.get(name)) is not None:
            target.copy_(tensor)
        elif entry.lands(meta):
            self._target(update, name, chosen).copy_(tensor)
        elif self.staging == "in_place":
            self._dirty, local = True, entry.local
            if local.numel():
                local.copy_(entry.cut(tensor))
        elif entry.group is not None and entry.dense:
            self._area.stage(update, entry.group).tensors[entry.index].copy_(tensor)
        else:
            piece = entry.cut(tensor)
            self._area.buffer(update, name, entry, meta.dtype, piece.shape).copy_(piece)

    def targets(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """See `WeightSink.targets`."""
        update, names, found = self._open(), list(names), {}
        if len(names) == len(update.landing) and names == list(update.landing):  # mostly the same objects: no hashing
            return dict(update.landing)
        with _plain():
            for name in names:
                target = update.landing.get(name)
                if target is not None:
                    found[name] = target
                elif chosen := update.find(name):
                    if name in update.came:
                        raise UpdateRefused(f"{name!r} has come already in this update", parameter=name)
                    found[name] = self._target(update, name, chosen)
        return found

    def _target(self, update: Update, name: str, chosen: Chosen) -> torch.Tensor:
        entry, meta = chosen
        group = entry.group
        if group is None or not entry.lands(meta):
            target = self._area.buffer(update, name, entry, meta.dtype, torch.Size(meta.shape))
        elif self.staging == "in_place":
            self._dirty = True
            update.exposed.add(group)
            target = group.views().tensors[entry.index]
        else:
            target = self._area.stage(update, group).tensors[entry.index]
        update.landing[name] = target
        return target

    def received(self, names: Iterable[str]) -> None:
        """See `WeightSink.received`."""
        update, names = self._open(), list(names)
        known = all(map(update.chosen.__contains__, names))
        update.arrive_all(names if known else [name for name in names if update.find(name)])

    def load_plan(self, metadata: Sequence[ParamMeta]) -> LoadPlan:
        """See `WeightSink.load_plan`: every parameter lands whole, of a DTensor the part that is here."""
        return self._plan_of(metadata)[1]

    def _plan_of(self, metadata: Sequence[ParamMeta]) -> tuple[dict[str, Chosen], LoadPlan]:
        if not self._inventory.unchanged():
            self._look_again(self._live_model())
        key = self._inventory, tuple(metadata)
        if self._planned is None or self._planned[0] != key:
            chosen = self._inventory.resolve(key[1], strict=self.strict, cast=self.cast, full=False)
            self._planned = key, chosen, plan_of_boxes((meta, entry.box) for entry, meta in chosen.values())
        return self._planned[1:]

    def landing(self, plan: LoadPlan) -> dict[str, torch.Tensor]:
        """See `WeightSink.landing`."""
        update, names = self._open(), [meta.name for meta in plan.sources]
        chosen = {name: found for name in names if (found := update.find(name)) is not None}
        if len(chosen) < len(names):
            raise UpdateRefused("the model is no longer as it was when the transfer was planned")
        targets = self.targets(name for name, (entry, _) in chosen.items() if entry.box is None)
        for name, (entry, meta) in chosen.items():
            if entry.box is not None:
                targets[name] = self._area.buffer(update, name, entry, meta.dtype, torch.Size(entry.box.shape))
        return {name: target.view(-1) for name, target in targets.items()}

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `WeightSink.adopt`."""
        update = self._open()
        with self._inventory.writing():
            for name, tensor in tensors.items():
                if chosen := update.find(name):
                    check_tensor(name, chosen[1], tensor)
                    if not tensor.is_contiguous():
                        raise UpdateRefused(f"{name!r} is to be adopted and is not contiguous", parameter=name)
                    update.arrive(name)
                    if self._adoptable(chosen[0], tensor):
                        update.adopted[name] = tensor.detach()
                    else:
                        self._put(update, name, chosen, tensor)

    def _adoptable(self, entry: Entry, tensor: torch.Tensor) -> bool:
        live, group = entry.tensors[0], entry.group
        return (
            group is not None
            and self._copied_because(group) is None
            and len(group.entries) == 1
            and entry.direct
            and (live.dtype, live.device) == (tensor.dtype, tensor.device)
        )

    def unpatchable(self, metadata: Sequence[ParamMeta]) -> str | None:
        """See `WeightSink.unpatchable`."""
        if self._torn:
            return TORN
        try:
            return module_patching.unpatchable(self._plan_of(metadata)[0])
        except UpdateRefused as error:
            return str(error)

    def patch(self, patches: Sequence[Patch]) -> None:
        """See `WeightSink.patch`; other tensors of the update may come in other ways."""
        update = self._open()
        update.held.add((patch for patch in patches if update.find(patch.name)), update.arrive)

    def keep(self, names: Iterable[str]) -> None:
        """See `WeightSink.keep`."""
        update = self._open()
        update.held.keep((name for name in names if update.find(name)), update.arrive)

    def outcome(self, plan: LoadPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSink.outcome`; for updates in which nothing came in another way."""
        update = self._open()
        assert update.came <= update.held.names | update.held.kept, "nothing has come in another way"
        return module_patching.outcome(plan, self._inventory.by_name, module_patching.checked_patches(update))

    def _copied_because(self, group: Group) -> str | None:
        return group.copied_because or ("commit='copy'" if self.options["commit"] == "copy" else None)

    # Closing an update

    def prepare(self) -> None:
        """See `WeightSink.prepare`."""
        update = self._open()
        check_complete(update.chosen, update.came)
        if update.held and self._torn:
            raise UpdateRefused(TORN)
        if update.repeated is not None and update.straight:
            update.plan = update.repeated
            return
        in_place = self.staging == "in_place"
        patches = module_patching.checked_patches(update)
        with _plain():
            closing = Closing(update, self._area, self._inventory, patches, self._copied_because, in_place=in_place)
            update.plan = closing.plan()

    def commit(self) -> CommitReport:
        """See `WeightSink.commit`."""
        update, began = self._update, time.perf_counter()
        assert update is not None, "begin comes first"
        assert update.plan is not None, "prepare comes first"
        plan, inventory = update.plan, self._inventory
        with inventory.writing():
            plan.give_way()
            try:
                plan.run(self._live_model() if inventory.sharded else None)
            except BaseException:
                if plan.half_copied:
                    self._tear(update)
                raise
        plan.settle()
        inventory.rebound(plan.tensors, plan.after)
        self._last = repetition(update, plan, self._last)
        self._update, self._dirty, self._torn = None, False, False
        self._damaged.clear()
        done, patched = plan.report(began), len(update.held.names)
        whole = len(update.came) - patched - len(update.held.kept)
        in_place = whole - done.copied - done.adopted if self.staging == "in_place" else 0
        return replace(done, patched=patched, in_place=in_place, allocated_bytes=self.allocated_bytes)

    def abort(self, *, retire: bool = False) -> None:
        """See `WeightSink.abort`. In place, retiring rebinds what was given out, except with `commit="copy"`."""
        update, self._update = self._update, None
        if update is None:
            return
        if self._dirty:
            self._tear(update)
        self._dirty = False
        if retire:
            self._area.retire(update)
            for group in update.exposed:
                self._move(group)
            self._last = None

    def _tear(self, update: Update) -> None:
        self._torn = True
        self._damaged.update(entry for entry, _ in update.chosen.values())

    def _move(self, group: Group) -> None:
        """Rebind `group` to a fresh copy of its live storage, into which somebody may still write."""
        if self._copied_because(group) is None:
            with _plain():
                plan, views = Plan(), self._area.new_views(group)
                for old, new in zip(group.views().tensors, views.tensors, strict=True):
                    new.copy_(old)
                plan.add(Rebind(group, views, []), 0)
                plan.run()
                plan.settle()
                group.spare, self._inventory.bound = None, None

    # Looking at the live weights

    def checksums(self) -> dict[str, str]:
        """See `WeightSink.checksums`."""
        return self._present().checksums()

    def inventory(self) -> list[Held]:
        """See `WeightSink.inventory`."""
        return self._present().held()

    def _present(self) -> Inventory:
        known = self._inventory
        return known if known.unchanged() else scan(self._live_model(), known)

    def reset(self) -> None:
        """See `WeightSink.reset`."""
        assert self._update is None, "no update is open while weights are reset"
        model = self._live_model()
        reshard(model)
        self._look_again(model)
        self._inventory.zero()


@contextmanager
def _plain() -> Iterator[None]:
    """The mode in which ordinary tensors are made, whatever the caller's."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def refuse_frozen(model: nn.Module) -> None:
    """Refuse to update what `torch._inductor.config.freezing` has compiled in: it would silently stay as it is.

    Raises:
        UpdateRefused: Freezing is on.
    """
    config = sys.modules.get("torch._inductor.config")
    if getattr(config, "freezing", False):
        raise UpdateRefused(
            f"torch._inductor.config.freezing is on, so a compiled {type(model).__name__} would keep its old weights "
            "whatever is pushed: compile with freezing off"
        )
