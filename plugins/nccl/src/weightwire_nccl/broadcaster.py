"""How trainer rank 0 broadcasts to the workers of a stock vLLM server: one NCCL communicator, of which it is rank 0.

vLLM's workers are given the communicator's id, join it, and all-reduce one float32 before anything else.
"""

from __future__ import annotations

import importlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

from weightwire.deadline import Deadline
from weightwire.errors import TransferError, TransportUnavailable

_IN_PROGRESS: Final = 7  # ncclInProgress
_POLL_SECONDS: Final = 0.0005
_ABORT_SECONDS: Final = 2.0


class Broadcaster(ABC):
    """One communicator, from its id to its end.

    Attributes:
        unique_id: The 128 bytes by which the workers find it.
    """

    unique_id: bytes

    @abstractmethod
    def connect(self, world_size: int, deadline: Deadline) -> None:
        """Wait until all ranks have joined, this one as rank 0.

        Args:
            world_size: Ranks of the communicator: this one and all workers.
            deadline: Ends the wait, also when it is cancelled.
        """

    @abstractmethod
    def warm_up(self, deadline: Deadline) -> None:
        """All-reduce one float32."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Begin to broadcast a contiguous tensor, which is kept until it has gone and must not change until `flush`."""

    @abstractmethod
    def flush(self, deadline: Deadline) -> None:
        """Wait until all that was sent has gone."""

    @abstractmethod
    def abort(self) -> None:
        """End it, and whatever is under way on this side; idempotent."""


class NCCLBroadcaster(Broadcaster):
    """By `nccl4py`, without blocking: every wait is a loop that the deadline ends.

    Args:
        device: Where the weights are; from elsewhere than a GPU they go through the current one.
        window: Bytes that may be under way at a time. One tensor may, of whatever size.

    Raises:
        TransportUnavailable: There is no `nccl4py`, or no GPU.
    """

    def __init__(self, device: torch.device | None, window: int) -> None:
        self._nccl = _import_nccl()
        if not torch.cuda.is_available():
            raise TransportUnavailable(
                "wire='vllm' broadcasts by NCCL, and this process has no GPU: run trainer rank 0 on one, or install "
                "weightwire-vllm in the server, which takes weights over gloo",
                transport="nccl",
            )
        if device is None or device.type != "cuda" or device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._window = window
        self._id = self._nccl.get_unique_id()
        self.unique_id = bytes(self._id)
        self._communicator: Any = None
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._moving: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._moving_bytes = 0

    def connect(self, world_size: int, deadline: Deadline) -> None:
        """See `Broadcaster.connect`."""
        with torch.cuda.device(self._device):
            config = self._nccl.NCCLConfig(blocking=False)
            self._communicator = self._nccl.Communicator.init(world_size, 0, self._id, config)
        self._accepted(deadline, f"waiting for the server's {world_size - 1} workers to join by NCCL")

    def warm_up(self, deadline: Deadline) -> None:
        """See `Broadcaster.warm_up`."""
        one = torch.zeros(1, device=self._device)
        self._enqueue(
            one, lambda stream: self._communicator.allreduce(one, one, self._nccl.SUM, stream=stream), deadline
        )
        self.flush(deadline)

    def send(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """See `Broadcaster.send`."""
        while self._moving and self._moving_bytes + tensor.nbytes > self._window:
            self._wait_for_oldest(deadline)
        here = tensor.to(self._device)
        self._enqueue(here, lambda stream: self._communicator.broadcast(here, here, 0, stream=stream), deadline)

    def flush(self, deadline: Deadline) -> None:
        """See `Broadcaster.flush`."""
        while self._moving:
            self._wait_for_oldest(deadline)

    def abort(self) -> None:
        """See `Broadcaster.abort`. NCCL may take its time, so that is not waited for long."""
        communicator, self._communicator = self._communicator, None
        kept, self._moving = self._moving, deque()
        if communicator is None:
            return

        def end() -> None:
            with torch.cuda.device(self._device):
                communicator.abort()
            kept.clear()  # no kernel reads these any more

        thread = threading.Thread(target=end, name="weightwire-nccl-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)

    def _enqueue(self, tensor: torch.Tensor, operation: Callable[[int], None], deadline: Deadline) -> None:
        """Start an operation on a stream of its own, once the current one has written the tensor."""
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._moving.append((event, tensor))
            self._moving_bytes += tensor.nbytes
            self._stream.wait_stream(torch.cuda.current_stream())
            operation(self._stream.cuda_stream)
            self._accepted(deadline, "waiting for NCCL to take an operation")
            event.record(self._stream)

    def _wait_for_oldest(self, deadline: Deadline) -> None:
        event, tensor = self._moving[0]
        while not event.query():  # type: ignore[no-untyped-call]
            self._accepted(deadline, "waiting for the workers to take a broadcast")
            deadline.check("waiting for the workers to take a broadcast")
            time.sleep(_POLL_SECONDS)
        self._moving.popleft()
        self._moving_bytes -= tensor.nbytes

    def _accepted(self, deadline: Deadline, what: str) -> None:
        """Wait until NCCL has accepted the last operation; a peer that it finds lost is an error here."""
        while (state := int(self._communicator.get_async_error())) == _IN_PROGRESS:
            deadline.check(what)
            time.sleep(_POLL_SECONDS)
        if state:
            words = self._nccl.get_error_string(state)
            raise TransferError(f"NCCL failed: {words} (NCCL_DEBUG=WARN tells more)", transport="nccl")


def _import_nccl() -> Any:
    try:
        return importlib.import_module("nccl.core")
    except ImportError as error:
        cuda = torch.version.cuda
        bindings = f" 'cuda-bindings=={cuda.partition('.')[0]}.*'" if cuda else ""
        raise TransportUnavailable(
            f"wire='vllm' needs nccl4py, and cuda-bindings for torch's CUDA ({error}): "
            f"pip install 'weightwire-nccl[vllm]'{bindings}",
            transport="nccl",
        ) from error
