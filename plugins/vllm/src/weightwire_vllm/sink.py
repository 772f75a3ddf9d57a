"""Where an update of a vLLM model waits until all of it is here and every rank of the fleet agrees."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import torch
from vllm.logger import init_logger

from weightwire import staging
from weightwire.errors import MessageError, Unsupported, UpdateRefused
from weightwire.inventory import check_tensor
from weightwire.layout import ParamMeta, total_bytes
from weightwire.load_plan import LoadPlan
from weightwire.module_update import check_complete
from weightwire.patching import TORN, HeldPatches, ReadyPatch, apply_all
from weightwire.piece_staging import PieceStaging
from weightwire.sink import CommitReport, Patch, UpdateSpec, WeightSink
from weightwire_vllm.install import Installation
from weightwire_vllm.options import Staging
from weightwire_vllm.twin import Twin

logger = init_logger("vllm.weightwire")


class VLLMSink(WeightSink):
    """Takes checkpoint tensors for a live vLLM model, whose own loader installs them at commit.

    What has come by regions is kept while it serves: patches change it, and all of it goes through vLLM's reload again.

    Args:
        model: The live model.
        model_config: Its configuration; a draft model has its own.
        vllm_config: The server's.
        device: Where the model lies.
        staging: Where an update waits. `"host"` and `"device"` hold every tensor of the checkpoint in full, on each
            rank, or of an update by regions what this rank's loader takes. `"none"` holds nothing: a transfer that
            fails leaves the weights torn, and nothing comes by regions.
        strict: Refuse updates that leave something out.
        cast: Convert other dtypes instead of refusing them.

    Attributes:
        device: Where transports deliver.
        unchecked: Why updates cannot be looked at before they move; None if they can.
    """

    def __init__(
        self,
        model: Any,
        model_config: Any,
        vllm_config: Any,
        *,
        device: torch.device,
        staging: Staging = "host",
        strict: bool = True,
        cast: bool = False,
    ) -> None:
        if staging not in get_args(Staging):
            raise MessageError(f"staging must be one of {', '.join(get_args(Staging))}, not {staging!r}")
        super().__init__(staging="in_place" if staging == "none" else "staged", strict=strict, cast=cast, commit="copy")
        self.device = device
        self.place: Staging = "host" if staging == "device" and device.type == "cpu" else staging
        if self.place != "none":
            # A host buffer is no target for what arrives on a device.
            direct = {"targets"} if self.place == "device" or device.type == "cpu" else set()
            self.capabilities = frozenset({"load", "patch", *direct})  # type: ignore[misc]
        self._configs = (model, model_config, vllm_config)
        self._twin: Twin | None = None
        self.unchecked: str | None = None
        self._checked: tuple[tuple[ParamMeta, ...], str] | None = None
        self._spec: UpdateSpec | None = None
        self._expected: dict[str, ParamMeta] = {}
        self._staged: dict[str, torch.Tensor] = {}
        self._layout: tuple[ParamMeta, ...] = ()
        self._pieces: PieceStaging | None = None
        self._planned: tuple[tuple[ParamMeta, ...], LoadPlan] | None = None
        self._by_regions = False
        self._serving = False
        """Whether the pieces are what serves."""
        self._dense = self._given = False
        """Whether something came in another way than by patches; whether memory for it was given out."""
        self._unproven = False
        """Whether nobody has looked yet if the update would be complete without patches."""
        self._came: set[str] = set()
        self._held = HeldPatches()
        self._ready: list[ReadyPatch] = []
        self._allocated = 0
        self._installation: Installation | None = None

    def describe(self) -> dict[str, Any]:
        """See `WeightSink.describe`."""
        return {**super().describe(), "staging": self.place, "host": "vllm", "pauses_at_commit": True}

    @property
    def allocated_bytes(self) -> int:
        """See `WeightSink.allocated_bytes`."""
        return self._allocated + (0 if self._pieces is None else self._pieces.allocated_bytes)

    def begin(self, spec: UpdateSpec) -> None:
        """See `WeightSink.begin`."""
        assert self._spec is None, "the previous update was neither committed nor aborted"
        expected: dict[str, ParamMeta] = {}
        for meta in spec.metadata:
            if meta.name in expected:
                raise UpdateRefused(f"{meta.name!r} occurs twice in the update", parameter=meta.name)
            expected[meta.name] = meta
        # What is patched need not bring whole layers: the others of a layer are here.
        self._unproven = spec.scope == "partial" and self.unpatchable(spec.metadata) is None
        if not self._unproven:
            self._check(spec)
        self._allocated = 0
        if self._pieces is not None:
            self._pieces.allocated_bytes = 0
        self._spec, self._expected, self._came, self._by_regions = spec, expected, set(), False
        self._held, self._ready, self._dense, self._given = HeldPatches(), [], False, False

    def _check(self, spec: UpdateSpec) -> None:
        key = (spec.metadata, spec.scope)
        if self._checked == key:
            return
        if self._twin is None and self.unchecked is None:
            _, model_config, vllm_config = self._configs
            try:
                self._twin = Twin(vllm_config, model_config)
            except Exception as error:  # noqa: BLE001  the constructor of any model may raise anything
                self.unchecked = f"{type(error).__name__}: {error}"
                logger.warning("weightwire: updates are not checked before they move, the model has no twin: %s", error)
        if self._twin is not None:
            self._twin.check(spec, strict=self.strict, cast=self.cast)
        self._checked = key

    def _laid_out(self) -> dict[str, torch.Tensor]:
        """Memory for every tensor of the open update in full; allocated when it is first asked for."""
        assert self._spec is not None, "begin comes first"
        metadata = self._spec.metadata
        if self._layout == metadata:
            return self._staged
        self._give_up_staging()
        device = self._staging_device()
        slab, sizes = staging.Slab(), [meta.nbytes for meta in metadata]
        for place, meta in enumerate(metadata):
            if meta.nbytes and device.type == "cpu":
                storage = slab.cut(meta.nbytes, partial(_bytes_from, sizes, place))
            else:
                storage = staging.allocate(meta.nbytes, device)
            self._staged[meta.name] = torch.empty(0, dtype=meta.dtype, device=device).set_(storage).view(meta.shape)
            self._allocated += meta.nbytes
        self._layout = metadata
        return self._staged

    def _staging_device(self) -> torch.device:
        return torch.device("cpu") if self.place == "host" else self.device

    def _give_up_staging(self) -> None:
        self._staged, self._layout, self._serving = {}, (), False
        if self._pieces is not None:
            self._pieces.forget()

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `WeightSink.load`."""
        self._take_dense()
        if self.place == "none":
            self._stream(pairs)
            return
        for name, tensor in pairs:
            check_tensor(name, self._announced(name), tensor)
            self._laid_out()[name].copy_(tensor)
            self._came.add(name)

    def _stream(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load into the live model; its loader may keep the tensors, so each is one of its own."""
        self._dirty = True
        installation = self._open()
        for name, tensor in pairs:
            check_tensor(name, self._announced(name), tensor)
            self._came.add(name)
            installation.load([(name, tensor.clone())])

    def _open(self) -> Installation:
        if self._installation is None:
            self._installation = Installation(*self._configs)
            self._installation.open()
        return self._installation

    def _announced(self, name: str) -> ParamMeta:
        if name not in self._expected:
            raise UpdateRefused(f"{name!r} is not in this update", parameter=name)
        if name in self._came:
            raise UpdateRefused(f"{name!r} came twice in one update", parameter=name)
        return self._expected[name]

    def targets(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """See `WeightSink.targets`."""
        self._take_dense()
        self._given = True
        staged = self._laid_out()
        return {name: staged[name] for name in names}

    def received(self, names: Iterable[str]) -> None:
        """See `WeightSink.received`."""
        for name in names:
            self._arrive(name)

    def _arrive(self, name: str) -> None:
        self._announced(name)
        self._came.add(name)

    # By regions

    def load_plan(self, metadata: Sequence[ParamMeta]) -> LoadPlan:
        """See `WeightSink.load_plan`: what this rank's loader takes. Whether that is all is looked at in `begin`.

        Raises:
            UpdateRefused: The model does not take these tensors.
            Unsupported: Nothing is staged here, and pieces have to wait for one another.
        """
        if self.place == "none":
            words = "no transport that sends each rank its part works with it, since the parts have to wait somewhere"
            raise Unsupported(f'staging "none": {words}; start the server with "staging": "host"')
        key = tuple(metadata)
        if self._planned is None or self._planned[0] != key:
            self._check(UpdateSpec(key, scope="partial"))
            self._pieces, self._serving = self._recorded(key), False
            self._planned = key, super().load_plan(key) if self._pieces is None else self._pieces.plan
        return self._planned[1]

    def _recorded(self, metadata: tuple[ParamMeta, ...]) -> PieceStaging | None:
        if self._twin is None:
            return None
        began = time.perf_counter()
        try:
            recorded = self._twin.record(metadata)
        except ValueError as error:
            logger.warning("weightwire: all tensors have to come in full, loading cannot be recorded: %s", error)
            return None
        logger.info(
            "weightwire: recorded in %.2f s what loading takes here: %d of %d bytes, %d of them in full",
            *(time.perf_counter() - began, recorded.piece_bytes + recorded.opaque_bytes),
            *(total_bytes(metadata), recorded.opaque_bytes),
        )
        return PieceStaging(recorded, self._staging_device())

    def landing(self, plan: LoadPlan) -> dict[str, torch.Tensor]:
        """See `WeightSink.landing`: memory for the pieces alone."""
        self._take_dense()
        self._check_plan(plan)
        self._given = True
        if self._pieces is None:
            return {name: tensor.view(-1) for name, tensor in self._laid_out().items()}
        self._staged, self._layout, self._serving = {}, (), False
        return self._pieces.memory()

    def _check_plan(self, plan: LoadPlan) -> None:
        if self._planned is None or plan is not self._planned[1]:
            raise UpdateRefused("the model is no longer as it was when the transfer was planned")

    def landed(self, plan: LoadPlan) -> None:
        """See `WeightSink.landed`."""
        self.received(meta.name for meta in plan.sources)
        self._by_regions = self._pieces is not None

    # Changing what serves

    def unpatchable(self, metadata: Sequence[ParamMeta]) -> str | None:
        """See `WeightSink.unpatchable`: whether the pieces of what serves are here, from an update by regions."""
        if self.place == "none":
            return super().unpatchable(metadata)
        if self._torn:
            return TORN
        if not self._serving or self._pieces is None:
            return "vLLM's own weights cannot be patched, and no update by regions has left here what they are made of"
        known = self._pieces.plan.by_name
        for meta in metadata:
            if known.get(meta.name) != ParamMeta(meta.name, meta.dtype, meta.shape):
                return f"what is kept here of the last update has no {meta.name!r} of this shape and dtype"
        return self._pieces.routes.reason

    def patch(self, patches: Sequence[Patch]) -> None:
        """See `WeightSink.patch`; nothing else may come in the same update."""
        self._check_way("patch")
        self._held.add(patches, self._arrive)

    def keep(self, names: Iterable[str]) -> None:
        """See `WeightSink.keep`."""
        self._check_way("keep")
        self._held.keep(names, self._arrive)

    def outcome(self, plan: LoadPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSink.outcome`: of the pieces."""
        pieces = self._patchable()
        self._check_plan(plan)
        return pieces.routes.outcome(self._held.checked(self._expected), pieces.held, pieces.held.__getitem__)

    def _patchable(self) -> PieceStaging:
        if (reason := self.unpatchable(tuple(self._expected.values()))) is not None:
            raise UpdateRefused(reason)
        assert self._pieces is not None, "what cannot be patched says so"
        return self._pieces

    def _check_way(self, way: str) -> None:
        if "patch" not in self.capabilities:
            raise self._lacks(way)
        self._refuse_mixing(self._dense)

    def _take_dense(self) -> None:
        self._refuse_mixing(bool(self._held))
        if self._unproven:
            assert self._spec is not None, "begin comes first"
            self._check(self._spec)
        self._dense, self._unproven = True, False

    def _refuse_mixing(self, mixed: bool) -> None:
        if mixed:
            raise UpdateRefused("an update is either patches and what is kept, or brings whole tensors or regions")

    # Closing an update

    def prepare(self) -> None:
        """See `WeightSink.prepare`."""
        assert self._spec is not None, "begin comes first"
        check_complete(self._expected, self._came)
        if self._held:
            pieces = self._patchable()
            self._ready = pieces.routes.ready(self._held.checked(self._expected), pieces.held)
            for patch in self._ready:
                patch.make_room()

    def commit(self) -> CommitReport:
        """See `WeightSink.commit`. An error leaves some layers new and some old, and `torn` set."""
        assert self._spec is not None, "begin comes first"
        began, full, in_place = time.perf_counter(), self._spec.scope == "full", self._installation is not None
        by_pieces = self._by_regions or bool(self._held)
        apply_all(self._ready)
        try:
            installation = self._open()
            if by_pieces:
                assert self._pieces is not None
                self._pieces.feed(installation.load, self._staging_device(), keep=True)
            elif not in_place:
                installation.load(self._staged.items())
            installation.finish()
        except BaseException:
            self._dirty, self._serving = True, False
            raise
        self._installation, self._dirty, self._serving = None, False, by_pieces
        self._torn &= not full
        report = self._report(time.perf_counter() - began, in_place=in_place)
        self._close()
        return report

    def _report(self, seconds: float, *, in_place: bool) -> CommitReport:
        count, patched = len(self._came), len(self._held.names)
        if in_place:
            return CommitReport(seconds, in_place=count)
        if self._held:
            return CommitReport(seconds, patched=patched)
        because = {"vLLM's reload": count}
        return CommitReport(seconds, copied=count, allocated_bytes=self.allocated_bytes, copied_because=because)

    def _close(self) -> None:
        self._spec, self._dirty, self._held, self._ready = None, False, HeldPatches(), []

    def abort(self, *, retire: bool = False) -> None:
        """See `WeightSink.abort`."""
        self._torn |= self._dirty
        installation, self._installation = self._installation, None
        if installation is not None:
            installation.abandon()
        if retire and self._given:
            self._give_up_staging()
        self._close()

    def checksums(self) -> dict[str, str]:
        """See `WeightSink.checksums`; of what the kernels use, which vLLM may have repacked."""
        model: Any = self._configs[0]
        return {name: staging.sha256(parameter) for name, parameter in model.named_parameters()}

    def reset(self) -> None:
        """See `WeightSink.reset`."""
        model: Any = self._configs[0]
        self._serving = False
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()


def _bytes_from(sizes: Sequence[int], place: int) -> int:
    return staging.slab_bytes(sizes[place:])
