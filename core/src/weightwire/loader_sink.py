"""The sink of a model that loads weights itself, through a method `load_weights`."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weightwire.dtensor import reshard
from weightwire.errors import TransferAborted, Unsupported, UpdateRefused, WeightwireError
from weightwire.inventory import Entry, Inventory, Views, check_tensor
from weightwire.layout import ParamMeta
from weightwire.load_plan import LoadPlan
from weightwire.loader_recording import Recorded, ready_storages, record
from weightwire.loader_twin import make_twin, paired_with
from weightwire.module_sink import refuse_frozen
from weightwire.module_update import Plan, Rebind, check_complete
from weightwire.patching import TORN, HeldPatches
from weightwire.recorded_install import storages, tensors_of
from weightwire.scan import scan
from weightwire.sink import CommitMode, CommitReport, Patch, Staging, UpdateSpec, WeightSink
from weightwire.staging_area import StagingArea


class LoaderSink(WeightSink):
    """The sink of an object with `load_weights(pairs)`, called once for each `load`.

    Names and shapes are those the loader takes, so `begin` can refuse nothing but repeated names; the loader says the
    rest. It loads into a twin of the model, brought up to date first, and commit exchanges the storages of the two:
    parameters, persistent buffers, and what shares storage with them. Patches go into the live storages themselves, by
    what the loader was seen to do; the twin gets them with the next update that it loads.

    Attributes:
        reason: Why it is in_place although staged was asked for; None if it is not.
    """

    def __init__(
        self,
        model: Any,
        *,
        staging: Staging = "staged",
        strict: bool = True,
        cast: bool = False,
        commit: CommitMode = "swap",
    ) -> None:
        super().__init__(staging=staging, strict=strict, cast=cast, commit=commit)
        if isinstance(model, nn.Module):
            self.capabilities = frozenset({"load", "patch"})  # type: ignore[misc]
        self._model = weakref.ref(model)
        self._twin: Any = None
        self.reason: str | None = None
        if staging == "staged":
            self._twin, self.reason = make_twin(model)
            self.staging = "in_place" if self._twin is None else "staged"
        self._expected: dict[str, ParamMeta] | None = None
        self._came: set[str] = set()
        self._held = HeldPatches()
        self._dense = self._given = False
        """Whether something came for the loader; whether memory for it was given out."""
        self._last: str | None = None
        self._full = False
        self._twins: dict[Entry, Entry] = {}
        self._plan: Plan | None = None
        self._stale: tuple[Inventory, dict[Entry, Entry]] | None = None
        self._pairs: tuple[Inventory, dict[Entry, Entry]] | None = None
        self._recorded: Recorded | None = None
        self._retired = False
        """Whether late bytes may still arrive in the twin."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory for pieces allocated since the last `begin`; twins are not counted."""
        pieces = self._recorded.pieces if self._recorded is not None else None
        return pieces.allocated_bytes if pieces is not None else 0

    def begin(self, spec: UpdateSpec) -> None:
        """See `WeightSink.begin`."""
        assert self._expected is None, "the previous update was neither committed nor aborted"
        expected: dict[str, ParamMeta] = {}
        for meta in spec.metadata:
            if meta.name in expected:
                raise UpdateRefused(f"{meta.name!r} occurs twice in the update", parameter=meta.name)
            expected[meta.name] = meta
        model = self._live_model()
        refuse_frozen(model)
        self._stale = None if self._twin is None else self._paired_with_twin(model)
        self._pairs = self._stale if self._stale and self._stale[1] else None
        self._expected, self._came, self._full = expected, set(), spec.scope == "full"
        self._held, self._dense, self._given = HeldPatches(), False, False
        if self._recorded is not None and self._recorded.pieces is not None:
            self._recorded.pieces.allocated_bytes = 0

    def _paired_with_twin(self, model: nn.Module) -> tuple[Inventory, dict[Entry, Entry]]:
        live = scan(model)
        if not self._retired:
            with suppress(UpdateRefused):  # an earlier load has rebuilt the twin
                return live, paired_with(live, scan(self._twin))
        twin, reason = make_twin(model)
        if twin is None:
            raise UpdateRefused(f"the model has no twin to load into any more: {reason}")
        self._twin, self._retired = twin, False
        return live, {}

    def _bring_twin_up_to_date(self, but: Collection[str] = ()) -> None:
        """What the loader leaves alone must be what is live now, since commit exchanges everything.

        Args:
            but: Names of tensors of which everything is replaced.
        """
        if self._stale is None:
            return
        (live, twins), self._stale = self._stale, None
        with live.writing():
            for here, there in twins.items():
                if not here.names or here.names[0] not in but:
                    there.local.copy_(here.local)

    def _live_model(self) -> Any:
        model = self._model()
        assert model is not None, "a sink is used while its model lives"
        return model

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `WeightSink.load`. What `load_weights` raises becomes an `UpdateRefused` in its words."""
        assert self._expected is not None, "begin comes first"
        assert self._plan is None, "nothing comes in after prepare"
        checked = self._checked(pairs, self._expected)
        self._run_loader(lambda loader: loader.load_weights(checked))

    def _run_loader(self, load: Callable[[Any], object]) -> None:
        """Have the twin, or without one the live model, load."""
        self._take_dense()
        self._dirty, self._pairs = self._twin is None, None
        self._bring_twin_up_to_date()
        loader = self._live_model() if self._twin is None else self._twin
        self._last = None
        try:
            with torch.no_grad():
                load(loader)
        except WeightwireError:
            raise
        except Exception as error:
            where = f" at {self._last!r}" if self._last is not None else ""
            words = f"load_weights of {type(loader).__name__} raised{where}: {type(error).__name__}: {error}"
            raise UpdateRefused(words, parameter=self._last) from error

    def _checked(
        self, pairs: Iterable[tuple[str, torch.Tensor]], expected: dict[str, ParamMeta]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            if self._expected is not expected:
                raise TransferAborted("the update was aborted while weights were being loaded")
            self._arrive(name)
            check_tensor(name, expected[name], tensor)
            self._last = name
            yield name, tensor

    def _noted(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for self._last, tensor in pairs:
            yield self._last, tensor

    # By regions

    def load_plan(self, metadata: Sequence[ParamMeta]) -> LoadPlan:
        """See `WeightSink.load_plan`: what the model's own loader was seen to do on a copy without storage."""
        model, key = self._live_model(), tuple(metadata)
        if self._recorded is None or not self._recorded.fits(model, key):
            self._recorded = record(model, key)
        return super().load_plan(key) if self._recorded is None else self._recorded.plan

    def landing(self, plan: LoadPlan) -> dict[str, torch.Tensor]:
        """See `WeightSink.landing`: the twin's own storage; memory for pieces where the loader has to run."""
        recorded = self._recorded
        if recorded is None:
            return super().landing(plan)
        self._take_dense()
        self._check_plan(plan)
        self._given = True
        if recorded.pieces is not None:
            return recorded.pieces.memory()
        self._dirty = self._twin is None
        self._bring_twin_up_to_date(but=recorded.covered)
        return ready_storages(plan, tensors_of(self._live_model() if self._twin is None else self._twin))

    def landed(self, plan: LoadPlan) -> None:
        """See `WeightSink.landed`."""
        if self._recorded is None:
            super().landed(plan)
            return
        if (pieces := self._recorded.pieces) is not None:
            self._run_loader(
                lambda loader: pieces.feed(lambda pairs: loader.load_weights(self._noted(pairs)), torch.device("cpu"))
            )
        self._came.update(meta.name for meta in plan.sources)

    def _check_plan(self, plan: LoadPlan) -> None:
        if self._recorded is None or self._recorded.plan is not plan:
            raise UpdateRefused("the model is no longer as it was when the transfer was planned")

    # Changing what serves

    def unpatchable(self, metadata: Sequence[ParamMeta]) -> str | None:
        """See `WeightSink.unpatchable`."""
        if self._torn:
            return TORN
        try:
            self._patchable(metadata)
        except (UpdateRefused, Unsupported) as error:
            return str(error)
        return None

    def _patchable(self, metadata: Sequence[ParamMeta]) -> tuple[Recorded, dict[str, torch.Tensor]]:
        """What the loader does with these tensors, or more, and the live storages that it writes.

        Raises:
            UpdateRefused: It does what cannot be done to some elements.
            Unsupported: The model is no module.
        """
        model = self._module("patch")
        if self._recorded is None or not self._recorded.holds(model, metadata):
            self.load_plan(metadata)
        if self._recorded is None:
            raise UpdateRefused(f"what load_weights of {type(model).__name__} does could not be recorded")
        if self._recorded.unpatchable is not None:
            raise UpdateRefused(self._recorded.unpatchable)
        return self._recorded, storages(self._recorded.plan, tensors_of(model))

    def patch(self, patches: Sequence[Patch]) -> None:
        """See `WeightSink.patch`; nothing else may come in the same update."""
        self._check_way("patch")
        self._held.add(patches, self._arrive)

    def keep(self, names: Iterable[str]) -> None:
        """See `WeightSink.keep`."""
        self._check_way("keep")
        self._held.keep(names, self._arrive)

    def outcome(self, plan: LoadPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSink.outcome`."""
        assert self._expected is not None, "begin comes first"
        recorded, flat = self._patchable(tuple(self._expected.values()))
        self._check_plan(plan)
        return recorded.routes.outcome(self._held.checked(self._expected), flat, flat.__getitem__)

    def _check_way(self, way: str) -> None:
        if "patch" not in self.capabilities:
            raise self._lacks(way)
        self._refuse_mixing(self._dense)

    def _take_dense(self) -> None:
        self._refuse_mixing(bool(self._held))
        self._dense = True

    def _refuse_mixing(self, mixed: bool) -> None:
        if mixed:
            raise UpdateRefused("an update is either patches and what is kept, or goes through the model's loader")

    def _arrive(self, name: str) -> None:
        assert self._expected is not None, "begin comes first"
        if name not in self._expected:
            raise UpdateRefused(f"{name!r} is not in this update", parameter=name)
        if name in self._came:
            raise UpdateRefused(f"{name!r} came twice in one update", parameter=name)
        self._came.add(name)

    # Closing an update

    def prepare(self) -> None:
        """See `WeightSink.prepare`."""
        assert self._expected is not None, "begin comes first"
        check_complete(self._expected, self._came)
        if self._held:
            self._plan = self._patching()
            return
        self._bring_twin_up_to_date()
        self._plan = Plan() if self._twin is None else self._exchange()

    def _patching(self) -> Plan:
        """A plan that patches the live model."""
        assert self._expected is not None, "begin comes first"
        if self._torn:
            raise UpdateRefused(TORN)
        recorded, flat = self._patchable(tuple(self._expected.values()))
        ready = recorded.routes.ready(self._held.checked(self._expected), flat)
        for patch in ready:
            patch.make_room()
        return Plan(patches=ready)

    def _exchange(self) -> Plan:
        """A plan that rebinds the live model to the storages of its twin."""
        plan = Plan()
        if self._pairs is not None and self._pairs[0].unchanged():  # and no loader has run
            live, self._twins = self._pairs
        else:
            live = scan(self._live_model())
            self._twins = paired_with(live, scan(self._twin))
        always_copied = "commit='copy'" if self.options["commit"] == "copy" else None
        for group in live.groups:
            entries = [entry for entry in group.entries if entry in self._twins]
            reason = group.copied_because or always_copied
            if reason is not None:
                plan.copies += [(entry, self._twins[entry].local, reason) for entry in entries]
            elif entries:
                tensors = [self._twins[entry].tensors[0].data for entry in group.entries]
                views = Views(tensors[0].untyped_storage(), tensors, ours=False)
                plan.add(Rebind(group, views, entries), live.known_users(group))
        plan.copies += [
            (entry, twin.local, entry.copied_because)
            for entry, twin in self._twins.items()
            if entry.copied_because is not None
        ]
        return plan

    def commit(self) -> CommitReport:
        """See `WeightSink.commit`."""
        plan, began = self._plan, time.perf_counter()
        assert plan is not None, "prepare comes first"
        model = self._live_model()
        written = [*plan.tensors, *(patch.memory for patch in plan.patches)]
        inference = any(tensor.is_inference() for tensor in written)
        with torch.inference_mode(inference), torch.no_grad():
            plan.give_way()
            for rebind in plan.rebinds:  # and the twin gets what was live
                for entry, before in zip(rebind.group.entries, rebind.group.views().tensors, strict=True):
                    twins = self._twins[entry].tensors
                    plan.tensors += twins
                    plan.after += [before] * len(twins)
                    plan.before += [rebind.views.tensors[entry.index]] * len(twins)
            try:
                plan.run(model if isinstance(model, nn.Module) else None)
            except BaseException:
                self._torn |= plan.half_copied
                raise
        self._torn &= not self._full
        in_place, patched = len(self._came) if self._dirty else 0, len(self._held.names)
        report = plan.report(began)
        self._close()
        return replace(report, patched=patched, in_place=in_place, allocated_bytes=self.allocated_bytes)

    def abort(self, *, retire: bool = False) -> None:
        """See `WeightSink.abort`. In place, retiring rebinds the model, except with `commit="copy"`."""
        self._torn |= self._dirty
        if retire and self._recorded is not None and self._given:
            self._retired = True
            if self._recorded.pieces is not None:
                self._recorded.pieces.forget()
            elif self._dirty and self.options["commit"] != "copy":
                self._move()
        self._close()

    def _move(self) -> None:
        """Rebind the live model to fresh copies of its storages, into which somebody may still write."""
        with torch.inference_mode(False), torch.no_grad():
            for group in scan(self._live_model()).groups:
                if group.copied_because is None:
                    for entry, fresh in zip(group.entries, StagingArea().new_views(group).tensors, strict=True):
                        fresh.copy_(entry.local)
                        for tensor in entry.tensors:
                            tensor.data = fresh

    def _close(self) -> None:
        self._expected, self._plan, self._twins, self._dirty = None, None, {}, False
        self._stale = self._pairs = None
        self._held = HeldPatches()

    def checksums(self) -> dict[str, str]:
        """See `WeightSink.checksums`."""
        return scan(self._module("checksums")).checksums()

    def reset(self) -> None:
        """See `WeightSink.reset`."""
        module = self._module("reset")
        reshard(module)
        scan(module).zero()

    def _module(self, way: str) -> nn.Module:
        model = self._live_model()
        if not isinstance(model, nn.Module):
            raise Unsupported(f"{way}: a {type(model).__name__} is no nn.Module, its tensors are not known")
        return model
