"""Putting a checkpoint's tensors into a live vLLM model: vLLM's own layerwise reload, which repacks for the kernels.

Each layer is built anew in checkpoint format, loaded, processed, and copied into the storage it had, so that
addresses (CUDA graphs) stay. That costs the memory of one layer while it lasts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info


class Installation:
    """One reload of one model, from `open` to `finish` or `abandon`.

    Args:
        model: The live model.
        model_config: Its configuration; a draft model has its own.
        vllm_config: The server's.
    """

    def __init__(self, model: Any, model_config: Any, vllm_config: Any) -> None:
        self._model: nn.Module = model
        self._model_config = model_config
        self._vllm_config = vllm_config
        self._kernels: list[tuple[Any, Any]] = []

    def open(self) -> None:
        """Put every layer aside, to be built anew."""
        with torch.no_grad(), set_current_vllm_config(self._vllm_config):
            initialize_layerwise_reload(self._model)
        self._put_kernels_aside()

    def _put_kernels_aside(self) -> None:
        """Have the kernels of experts on a CPU made anew.

        Weights are packed for one only while it is made: vLLM's reload, which keeps it, leaves weights as in the
        checkpoint where it expects packed ones.
        """
        for layer in self._model.modules():
            method: Any = getattr(layer, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            tensors = [
                tensor for tensors in get_layerwise_info(layer).kernel_tensors or () for tensor in tensors.values()
            ]
            if kernel is not None and tensors and all(tensor.device.type == "cpu" for tensor in tensors):
                self._kernels.append((method, kernel))
                method.moe_kernel = None

    def _put_kernels_back(self) -> None:
        """Those of layers that nothing came for."""
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand tensors to the model's loader, which may keep them until `finish`."""
        with torch.no_grad(), set_current_vllm_config(self._vllm_config):
            self._model.load_weights(pairs)  # type: ignore[operator]

    def finish(self) -> None:
        """Process what waited for more, and put back what nothing came for."""
        with torch.no_grad(), set_current_vllm_config(self._vllm_config):
            finalize_layerwise_reload(self._model, self._model_config)
            self._pack_tied_again()
        self._put_kernels_back()

    def _pack_tied_again(self) -> None:
        """Have layers on a CPU that share their weight with another one pack it for their kernels again.

        Nothing comes for a head that is tied to the embedding, so vLLM's reload leaves it alone; but where the
        processor's kernels take packed weights it has a copy of the old ones, and would answer with them.
        """
        tied: dict[int, list[nn.Module]] = {}
        for layer in self._model.modules():
            weight = getattr(layer, "weight", None)
            if isinstance(weight, torch.Tensor) and weight.numel() and hasattr(layer, "cpu_linear"):
                tied.setdefault(weight.data_ptr(), []).append(layer)
        for layers in tied.values():
            for layer in layers if len(layers) > 1 else ():
                method: Any = layer.quant_method
                method.process_weights_after_loading(layer)

    def abandon(self) -> None:
        """Put back the old tensors of every layer that has not been replaced: some layers are new, the others old.

        vLLM itself would leave those on the meta device with what came for them so far, which the next reload would
        mix with what comes then.
        """
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if not info.can_load():
                continue
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
        self._put_kernels_back()
        if hasattr(self._model, "_original_do_torchao_reload"):
            self._model._do_torchao_reload = self._model._original_do_torchao_reload
