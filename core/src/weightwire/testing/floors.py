"""The references of every benchmark: memcpy, and raw gloo in the simplest forms.

memcpy                  one call of the C library's memcpy over the payload's bytes in the sender, huge pages, warm
memcpy_by_tensor        the same bytes tensor by tensor, on ordinary pages as a model's
raw_broadcast           one tensor of the payload's size, one gloo broadcast to all receivers
raw_send                the same tensor by gloo send/recv, all receivers at once
per_tensor_broadcast    a broadcast for each tensor, one after the other
per_tensor_send         send/recv for each tensor, one after the other
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from weightwire.source import as_bytes
from weightwire.testing.measure_rank import Seat, Way
from weightwire.testing.payload import build_module, digest, huge_buffer, randomize

_TIMEOUT = timedelta(seconds=120)


class Memcpy(Way):
    """The sender copies the payload's bytes from one warm buffer to another; receivers rest.

    It is the C library's memcpy that copies, which writes past the caches: torch's `copy_` is a third slower.
    """

    name = "memcpy"
    weighed_rounds = 1
    _original: list[torch.Tensor]
    _copy: list[torch.Tensor]

    def connect(self, seat: Seat, offers: list[Any]) -> None:
        """Allocate original and copy."""
        if seat.sends:
            self._original, self._copy = self.allocate(seat), self.allocate(seat)
            generator = torch.Generator().manual_seed(0)
            for tensor in self._original:
                randomize(as_bytes(tensor), generator)

    def allocate(self, seat: Seat) -> list[torch.Tensor]:
        """The payload's bytes as zeros, every page touched, on huge pages: this is what memory can do at best."""
        return [huge_buffer(seat.payload.nbytes)]

    def step(self, seat: Seat) -> None:
        """Copy."""
        if seat.sends:
            for target, source in zip(self._copy, self._original, strict=True):
                ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

    def held(self, seat: Seat) -> list[torch.Tensor]:
        """The bytes that are copied."""
        return self._original if seat.sends else []

    def warm(self, seat: Seat) -> None:
        """Touch both; receivers hold nothing."""
        self.step(seat)

    def digests(self, seat: Seat) -> list[str]:
        """Of original and copy."""
        return [digest(self._original), digest(self._copy)] if seat.sends else []


class MemcpyByTensor(Memcpy):
    """The same for a module's parameters, one after the other, where a module has them."""

    name = "memcpy_by_tensor"

    def allocate(self, seat: Seat) -> list[torch.Tensor]:
        """Parameters of zeros on ordinary pages, all touched."""
        return [parameter.data for parameter in build_module(seat.payload).parameters()]


class GlooWay(Way):
    """A way over a gloo group of its own on loopback."""

    weighed_rounds = 1

    def connect(self, seat: Seat, offers: list[Any]) -> None:
        """Build the group."""
        gloo: Any = torch.distributed.ProcessGroupGloo  # torch's stubs know neither its options nor its operations
        options = gloo._Options()
        options._timeout = _TIMEOUT
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        store = FileStore(f"{seat.directory}/{self.name}", seat.world)
        self.group = gloo(store, seat.rank, seat.world, options)

    def warm(self, seat: Seat) -> None:
        """Touch what is held."""
        self.held(seat)

    def step(self, seat: Seat) -> None:
        """Move what is held."""
        self.move(seat, self.held(seat))

    def move(self, seat: Seat, tensors: list[torch.Tensor]) -> None:
        """Move `tensors` one after the other."""
        raise NotImplementedError

    def close(self, seat: Seat) -> None:
        """Leave the group."""
        del self.group


class _Broadcasts(GlooWay):
    def move(self, seat: Seat, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self.group.broadcast(tensor, 0).wait()


class _Sends(GlooWay):
    def move(self, seat: Seat, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if seat.sends:
                works = [self.group.send([tensor], rank, 0) for rank in range(1, seat.world)]
            else:
                works = [self.group.recv([tensor], 0, 0)]
            for work in works:
                work.wait()


class _OneTensor(GlooWay):
    def held(self, seat: Seat) -> list[torch.Tensor]:
        return [seat.flat()]


class RawBroadcast(_OneTensor, _Broadcasts):
    """One broadcast of one tensor."""

    name = "raw_broadcast"


class RawSend(_OneTensor, _Sends):
    """One send/recv of one tensor for each receiver."""

    name = "raw_send"


class PerTensorBroadcast(_Broadcasts):
    """A broadcast for each parameter."""

    name = "per_tensor_broadcast"


class PerTensorSend(_Sends):
    """A send/recv for each parameter and receiver."""

    name = "per_tensor_send"


def memory_floors() -> list[Way]:
    """What this machine's memory does, without any transport: for those that move bytes within a host."""
    return [Memcpy(), MemcpyByTensor()]


def floors() -> list[Way]:
    """memcpy, and one of each of the four over gloo."""
    return [Memcpy(), RawBroadcast(), RawSend(), PerTensorBroadcast(), PerTensorSend()]
