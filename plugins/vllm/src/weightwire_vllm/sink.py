"""Where an update of a vLLM model waits until all of it is here and every rank of the fleet agrees."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, get_args

import torch
from vllm.logger import init_logger

from weightwire import staging
from weightwire.errors import MessageError, UpdateRefused
from weightwire.inventory import check_tensor
from weightwire.layout import ParamMeta
from weightwire.module_update import check_complete
from weightwire.sink import CommitReport, UpdateSpec, WeightSink
from weightwire_vllm.install import Installation
from weightwire_vllm.options import Staging
from weightwire_vllm.twin import Twin

logger = init_logger("vllm.weightwire")


class VLLMSink(WeightSink):
    """Takes checkpoint tensors for a live vLLM model, whose own loader installs them at commit.

    Args:
        model: The live model.
        model_config: Its configuration; a draft model has its own.
        vllm_config: The server's.
        device: Where the model lies.
        staging: Where an update waits. `"host"` and `"device"` hold every tensor of the checkpoint in full, on each
            rank. `"none"` holds nothing: a transfer that fails leaves the weights torn.
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
        # A host buffer is no target for what arrives on a device.
        if self.place == "device" or (self.place == "host" and device.type == "cpu"):
            self.capabilities = frozenset({"load", "targets"})  # type: ignore[misc]
        self._configs = (model, model_config, vllm_config)
        self._twin: Twin | None = None
        self.unchecked: str | None = None
        self._checked: tuple[tuple[ParamMeta, ...], str] | None = None
        self._spec: UpdateSpec | None = None
        self._expected: dict[str, ParamMeta] = {}
        self._staged: dict[str, torch.Tensor] = {}
        self._layout: tuple[ParamMeta, ...] = ()
        self._came: set[str] = set()
        self._allocated = 0
        self._installation: Installation | None = None

    def describe(self) -> dict[str, Any]:
        """See `WeightSink.describe`."""
        return {**super().describe(), "staging": self.place, "host": "vllm", "pauses_at_commit": True}

    @property
    def allocated_bytes(self) -> int:
        """See `WeightSink.allocated_bytes`."""
        return self._allocated

    def begin(self, spec: UpdateSpec) -> None:
        """See `WeightSink.begin`."""
        assert self._spec is None, "the previous update was neither committed nor aborted"
        expected: dict[str, ParamMeta] = {}
        for meta in spec.metadata:
            if meta.name in expected:
                raise UpdateRefused(f"{meta.name!r} occurs twice in the update", parameter=meta.name)
            expected[meta.name] = meta
        self._check(spec)
        self._allocated = 0
        if self.place != "none":
            self._lay_out(spec.metadata)
        self._spec, self._expected, self._came = spec, expected, set()

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

    def _lay_out(self, metadata: tuple[ParamMeta, ...]) -> None:
        if self._layout == metadata:
            return
        self._staged, self._layout = {}, ()
        device = torch.device("cpu") if self.place == "host" else self.device
        slab, sizes = staging.Slab(), [meta.nbytes for meta in metadata]
        for place, meta in enumerate(metadata):
            if meta.nbytes and device.type == "cpu":
                storage = slab.cut(meta.nbytes, partial(_bytes_from, sizes, place))
            else:
                storage = staging.allocate(meta.nbytes, device)
            self._staged[meta.name] = torch.empty(0, dtype=meta.dtype, device=device).set_(storage).view(meta.shape)
            self._allocated += meta.nbytes
        self._layout = metadata

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `WeightSink.load`."""
        if self.place == "none":
            self._stream(pairs)
            return
        for name, tensor in pairs:
            check_tensor(name, self._announced(name), tensor)
            self._staged[name].copy_(tensor)
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
        return {name: self._staged[name] for name in names}

    def received(self, names: Iterable[str]) -> None:
        """See `WeightSink.received`."""
        for name in names:
            self._announced(name)
            self._came.add(name)

    def prepare(self) -> None:
        """See `WeightSink.prepare`."""
        assert self._spec is not None, "begin comes first"
        check_complete(self._expected, self._came)

    def commit(self) -> CommitReport:
        """See `WeightSink.commit`. An error leaves some layers new and some old, and `torn` set."""
        assert self._spec is not None, "begin comes first"
        began, full, count = time.perf_counter(), self._spec.scope == "full", len(self._came)
        in_place = self._installation is not None
        try:
            installation = self._open()
            if not in_place:
                installation.load(self._staged.items())
            installation.finish()
        except BaseException:
            self._dirty = True
            raise
        self._installation, self._dirty = None, False
        self._torn &= not full
        self._spec = None
        seconds = time.perf_counter() - began
        counts = {"in_place": count} if in_place else {"copied": count, "copied_because": {"vLLM's reload": count}}
        return CommitReport(seconds=seconds, allocated_bytes=self._allocated, **counts)

    def abort(self, *, retire: bool = False) -> None:
        """See `WeightSink.abort`."""
        self._torn |= self._dirty
        installation, self._installation = self._installation, None
        if installation is not None:
            installation.abandon()
        if retire:
            self._staged, self._layout = {}, ()
        self._spec, self._dirty = None, False

    def checksums(self) -> dict[str, str]:
        """See `WeightSink.checksums`; of what the kernels use, which vLLM may have repacked."""
        model: Any = self._configs[0]
        return {name: staging.sha256(parameter) for name, parameter in model.named_parameters()}

    def reset(self) -> None:
        """See `WeightSink.reset`."""
        model: Any = self._configs[0]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()


def _bytes_from(sizes: Sequence[int], place: int) -> int:
    return staging.slab_bytes(sizes[place:])
