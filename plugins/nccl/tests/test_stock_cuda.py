"""NCCL itself, on vLLM's wire: on one GPU a communicator of one, on two a trainer and a worker."""

from __future__ import annotations

import base64
import importlib
from typing import Any

import pytest
import torch

from plugins.nccl.tests.stock_scene import Mixed, StockWorker, same
from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded
from weightwire.source import ModuleSource
from weightwire_nccl.broadcaster import NCCLBroadcaster
from weightwire_nccl.messages import NCCLTrainerInitInfo
from weightwire_nccl.stock import StockNCCLTrainer

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]


def test_a_communicator_of_one() -> None:
    pytest.importorskip("nccl.core")
    broadcaster = NCCLBroadcaster(torch.device("cuda", 0), 1 << 20)
    assert len(broadcaster.unique_id) == 128
    broadcaster.connect(1, Deadline(60.0))
    broadcaster.warm_up(Deadline(60.0))
    sent = [torch.full((1 << 18,), float(place), device="cuda:0") for place in range(8)]
    for tensor in [*sent, torch.ones(3, dtype=torch.bfloat16), torch.empty(0, device="cuda:0")]:
        broadcaster.send(tensor, Deadline(60.0))
    broadcaster.flush(Deadline(60.0))
    assert [float(tensor[0]) for tensor in sent] == [float(place) for place in range(8)]
    broadcaster.abort()
    broadcaster.abort()


def test_a_worker_that_never_joins() -> None:
    pytest.importorskip("nccl.core")
    broadcaster = NCCLBroadcaster(torch.device("cuda", 0), 1 << 20)
    with pytest.raises(DeadlineExceeded, match="the server's 1 workers to join"):
        broadcaster.connect(2, Deadline(2.0))
    broadcaster.abort()


class NCCLGroup:
    """A worker's side, as vLLM has it: on its GPU's current stream."""

    def __init__(self, init_info: dict[str, Any], device: torch.device) -> None:
        nccl = importlib.import_module("nccl.core")
        self.device = device
        unique_id = nccl.UniqueId.from_bytes(base64.b64decode(init_info["nccl_unique_id_b64"]))
        with torch.cuda.device(device):
            self._communicator = nccl.Communicator.init(init_info["world_size"], 1, unique_id)
            one = torch.zeros(1, device=device)
            self._communicator.allreduce(one, one, nccl.SUM, stream=torch.cuda.current_stream().cuda_stream)
            torch.cuda.current_stream().synchronize()

    def broadcast(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        there = tensor.to(self.device)
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            self._communicator.broadcast(there, there, 0, stream=stream.cuda_stream)
            stream.synchronize()
        tensor.copy_(there)

    def close(self) -> None:
        self._communicator.abort()


class GPUWorker(StockWorker):
    """A worker on the second GPU, in the trainer's process."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.init_info = init_info
        group: Any = NCCLGroup(init_info, torch.device("cuda", 1))
        self.group = group


@pytest.mark.parametrize("packed", [True, False])
def test_rounds_to_a_worker_on_another_gpu(packed: bool) -> None:
    pytest.importorskip("nccl.core")
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes one rank for each GPU, and there is only one")
    worker, model = GPUWorker(), Mixed(1.0).to("cuda:0")
    info = NCCLTrainerInitInfo(wire="vllm", world_size=2, packed=packed, packed_buffer_size_bytes=90, timeout=60.0)
    sender = StockNCCLTrainer.trainer_init(info, client=worker, source=ModuleSource(model))
    for value in (1.0, 2.0):
        model.load_state_dict(Mixed(value).state_dict())
        sender.send_weights()
        assert same(worker.weights, Mixed(value))
    sender.shutdown()
    worker.close()
