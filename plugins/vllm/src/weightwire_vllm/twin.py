"""What the model's own loader makes of an update, found out on a copy of the model that has no storage.

The copy is built like the model itself, on the meta device, and is given tensors without storage: so wrong names and
shapes raise before any byte has moved, and what each copy covers is counted. vLLM's reload fills whatever nothing
came for with whatever lies in memory; here it is refused.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from weightwire.errors import UpdateRefused
from weightwire.layout import ParamMeta, dtype_name
from weightwire.load_plan import LoadPlan
from weightwire.recording import record_loads
from weightwire.sink import UpdateSpec

_LISTED = 5
_FILLS = frozenset((torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default))


class Twin:
    """A model without storage that loads as the live one does.

    Args:
        vllm_config: The server's configuration.
        model_config: The model's; a draft model has its own.

    Raises:
        Exception: Whatever a model raises that cannot be built without storage.
    """

    def __init__(self, vllm_config: Any, model_config: Any) -> None:
        self._config = copy.copy(vllm_config)
        # A layer enters itself here under its name, and the live one is there already.
        self._config.compilation_config = copy.copy(vllm_config.compilation_config)
        self._config.compilation_config.static_forward_context = {}
        self._quantized = getattr(model_config, "quantization", None) is not None
        dtype = set_default_torch_dtype(model_config.dtype)
        with set_current_vllm_config(self._config), dtype, torch.device("meta"):
            self._model: nn.Module = initialize_model(vllm_config=self._config, model_config=model_config)

    def check(self, spec: UpdateSpec, *, strict: bool, cast: bool) -> None:
        """Load what `spec` announces, as tensors without storage.

        Raises:
            UpdateRefused: The loader raised, a dtype differs (without `cast`), or (with `strict`) a full update leaves
                parameters out or a partial one some of a layer's; the parameter is named.
        """
        coverage = _Coverage(self._model, cast=cast)
        try:
            with torch.no_grad(), set_current_vllm_config(self._config), coverage:
                self._model.load_weights(coverage.feed(spec.metadata))  # type: ignore[operator]
        except UpdateRefused:
            raise
        except Exception as error:
            name = coverage.current
            words = f"vLLM's loader of {type(self._model).__name__} refuses {name!r}: {type(error).__name__}: {error}"
            raise UpdateRefused(words, parameter=name) from error
        # What a quantised model's loader writes is not what the checkpoint has.
        if strict and not self._quantized:
            coverage.check_complete(full=spec.scope == "full")

    def record(self, metadata: tuple[ParamMeta, ...]) -> LoadPlan:
        """Which elements of these tensors the loader takes.

        Raises:
            ValueError: A parameter has storage after all.
        """
        with set_current_vllm_config(self._config):
            return record_loads(self._model, metadata)


class _Coverage(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements of each parameter that are written, and remembers what is being loaded."""

    def __init__(self, model: nn.Module, *, cast: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current: str | None = None
        self._cast = cast
        self._model = model
        self._names = {_key(parameter): name for name, parameter in model.named_parameters()}
        self._written: Counter[int] = Counter()

    def feed(self, metadata: tuple[ParamMeta, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        """The announced parameters, without storage."""
        for meta in metadata:
            self.current = meta.name
            yield meta.name, torch.empty(meta.shape, dtype=meta.dtype, device="meta")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            if target.dtype != source.dtype and not self._cast and _key(target) in self._names:
                here, there = dtype_name(target.dtype), dtype_name(source.dtype)
                raise UpdateRefused(
                    f"{self.current!r} is {there} in the update and goes into {self._names[_key(target)]!r}, which is "
                    f'{here} here; the server\'s option "cast": true converts',
                    parameter=self.current,
                )
            self._written[_key(target)] += target.numel()
        elif function in _FILLS:
            self._written[_key(args[0])] += args[0].numel()
        return function(*args, **(kwargs or {}))

    def check_complete(self, *, full: bool) -> None:
        missing: list[str] = []
        for prefix, layer in self._model.named_modules():
            own = dict(layer.named_parameters(recurse=False))
            touched = any(self._written[_key(one)] for one in own.values())
            if full or touched:
                missing += [f"{prefix}.{name}".lstrip(".") for name, one in own.items() if not self._covered(one)]
        if not missing:
            return
        listed = ", ".join(map(repr, missing[:_LISTED])) + (", ..." if len(missing) > _LISTED else "")
        rule = "a full update must bring every parameter" if full else "an update must bring whole layers"
        raise UpdateRefused(
            f"{rule}; for {len(missing)} of vLLM's parameters something is missing: {listed}", parameter=missing[0]
        )

    def _covered(self, parameter: torch.Tensor) -> bool:
        return self._written[_key(parameter)] >= int(getattr(parameter, "weight_loader_numel", parameter.numel()))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
