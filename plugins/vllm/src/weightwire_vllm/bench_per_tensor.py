"""The naive way that the benchmark compares with: one gloo broadcast, one loader call for each tensor."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from weightwire.clients.http import HTTPVLLMWeightSyncClient
from weightwire.layout import dtype_name

BACKEND = "per_tensor"
_LIMIT = timedelta(seconds=120)
_c10d: Any = distributed


def join(address: str, port: int, rank: int, world_size: int) -> Any:
    """A gloo group over a TCPStore that rank 0 hosts."""
    store = _c10d.TCPStore(address, port, world_size, is_master=rank == 0, timeout=_LIMIT)
    return _c10d.ProcessGroupGloo(store, rank, world_size, _LIMIT)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Broadcast from rank 0."""
    options = _c10d.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


class PerTensorEngine(WeightTransferEngine[Any, Any]):
    """Receives and loads tensor by tensor, as vLLM's own engine does on a GPU without packing."""

    init_info_cls = dict
    update_info_cls = dict

    _group: Any = None

    def __call__(self, question: str) -> dict[str, Any]:
        """What the benchmark asks a HostedEngine too."""
        return {"pid": os.getpid()}

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """As it is."""
        return init_dict

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's group."""
        self._group = join(**init_info)

    def start_weight_update(self) -> None:
        """Put the model's layers aside."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive everything."""
        self.receive_weights(update_info)

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load tensor by tensor."""
        for name, dtype, shape in zip(*(update_info[key] for key in ("names", "dtype_names", "shapes")), strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self._group, tensor)
            self.model.load_weights([(name, tensor)])

    def finish_weight_update(self) -> None:
        """Put the layers back."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave."""
        self._group = None


class PerTensorTrainer:
    """The trainer's side.

    Args:
        client: The server.
        model: What is sent.
        port: A free port for the group's store.
    """

    def __init__(self, client: HTTPVLLMWeightSyncClient, model: nn.Module, port: int) -> None:
        self._client = client
        self._model = model
        with ThreadPoolExecutor(1) as beside:
            call = beside.submit(
                client.init_weight_transfer_engine,
                {"address": "127.0.0.1", "port": port, "rank": 1, "world_size": 2},
            )
            self._group = join("127.0.0.1", port, 0, 2)
            call.result()

    def send(self) -> None:
        """One round, paused."""
        pairs = [(name, parameter.detach()) for name, parameter in self._model.named_parameters()]
        update = {
            "names": [name for name, _ in pairs],
            "dtype_names": [dtype_name(tensor.dtype) for _, tensor in pairs],
            "shapes": [list(tensor.shape) for _, tensor in pairs],
        }
        self._client.pause("keep")
        self._client.start_weight_update()
        with ThreadPoolExecutor(1) as beside:
            call = beside.submit(self._client.update_weights, update)
            for _, tensor in pairs:
                broadcast(self._group, tensor)
            call.result()
        self._client.finish_weight_update()
        self._client.resume()
