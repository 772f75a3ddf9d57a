"""The references of every benchmark: memcpy, and raw gloo in the simplest forms.

memcpy                  one thread copies the payload's bytes within the sender, huge pages, warm
raw_broadcast           one tensor of the payload's size, one gloo broadcast to all receivers
raw_send                the same tensor by gloo send/recv, all receivers at once
per_tensor_broadcast    a broadcast for each tensor, one after the other
per_tensor_send         send/recv for each tensor, one after the other
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from weightwire.testing.measure_rank import Seat, Way
from weightwire.testing.payload import digest, huge_buffer, randomize

_TIMEOUT = timedelta(seconds=120)


class Memcpy(Way):
    """The sender copies the payload's bytes from one warm buffer to another; receivers rest."""

    name = "memcpy"
    weighed_rounds = 1

    def connect(self, seat: Seat, offers: list[Any]) -> None:
        """Allocate original and copy, both on huge pages: this is what memory can do at best."""
        if seat.sends:
            self._original = huge_buffer(seat.payload.nbytes)
            self._copy = huge_buffer(seat.payload.nbytes)
            randomize(self._original, torch.Generator().manual_seed(0))

    def step(self, seat: Seat) -> None:
        """Copy."""
        if seat.sends:
            self._copy.copy_(self._original)

    def held(self, seat: Seat) -> list[torch.Tensor]:
        """The bytes that are copied."""
        return [self._original] if seat.sends else []

    def warm(self, seat: Seat) -> None:
        """Touch both buffers; receivers hold nothing."""
        if seat.sends:
            self.step(seat)

    def digests(self, seat: Seat) -> list[str]:
        """Of original and copy."""
        return [digest([self._original]), digest([self._copy])] if seat.sends else []


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


def floors() -> list[Way]:
    """One of each of the five."""
    return [Memcpy(), RawBroadcast(), RawSend(), PerTensorBroadcast(), PerTensorSend()]
