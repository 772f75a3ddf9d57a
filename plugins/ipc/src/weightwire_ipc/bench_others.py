"""Other ways of bringing a private source to another process of the host, which backend `ipc` is measured against.

copy_in_copy_out    one memory file of the whole size, reused: the sender copies in, the receiver copies out
fresh_segments      the same with a new memory file in every round
process_vm_readv    the receiver reads the sender's memory by a system call
torch_sharing       fresh shared tensors over a multiprocessing connection, copied out
nixl                the receiver reads registered memory through NIXL over UCX

Each has one receiver, and both ends know that the bytes are there before its step ends.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import multiprocessing
import select
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.multiprocessing.reductions import init_reductions

from weightwire.deadline import Deadline
from weightwire.errors import TransferError
from weightwire.packing import ALIGNMENT
from weightwire.source import as_bytes
from weightwire.testing.measure import Seat, Way
from weightwire.testing.payload import build_module
from weightwire_ipc.channel import Channel
from weightwire_ipc.copying import copy_bytes, copy_spans, spans
from weightwire_ipc.memory import Mapping, MemoryFile
from weightwire_ipc.process_memory import copy_from, refusal

_STEP_SECONDS = 120.0
_PAUSE_SECONDS = 0.0002


class Pair(Way):
    """A sender and a receiver that tell each other over a Unix socket how far they are."""

    def offer(self, seat: Seat) -> str:
        """Listen."""
        self._listener = _socket()
        address = f"{seat.directory}/{self.name}"
        self._listener.bind(address)
        self._listener.listen()
        return address

    def connect(self, seat: Seat, offers: list[str]) -> None:
        """Meet, and prepare."""
        deadline = Deadline(_STEP_SECONDS, what=f"connecting {self.name}")
        if seat.sends:
            (address,) = offers
            sock = _socket()
            sock.connect(address)
        else:
            sock, _ = self._listener.accept()
            self._listener.close()
        self.channel = Channel(sock, "the receiver" if seat.sends else "the sender")
        self.prepare(seat, deadline)

    def prepare(self, seat: Seat, deadline: Deadline) -> None:
        """On both: make what is used in every round."""

    def step(self, seat: Seat) -> None:
        """Move the payload; the sender waits until the receiver has it."""
        deadline = Deadline(_STEP_SECONDS, what=self.name)
        if seat.sends:
            kept = self.hand_over(seat, deadline)
            self.channel.receive(deadline, "the bytes to be taken")
            del kept
        else:
            self.take(seat, deadline)
            self.channel.send({}, deadline=deadline)

    def hand_over(self, seat: Seat, deadline: Deadline) -> Any:
        """On the sender: say that the bytes are there; what is returned is kept until they have been taken."""
        raise NotImplementedError

    def take(self, seat: Seat, deadline: Deadline) -> None:
        """On the receiver: wait for word and fill the tensors."""
        raise NotImplementedError

    def close(self, seat: Seat) -> None:
        """Hang up."""
        self.channel.close()


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(_STEP_SECONDS)
    return sock


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where tensors begin that lie one after the other, and at last where they end."""
    return list(itertools.accumulate((-(-one.nbytes // ALIGNMENT) * ALIGNMENT for one in tensors), initial=0))


def _copy(memory: torch.Tensor, tensors: Sequence[torch.Tensor], deadline: Deadline, *, out: bool) -> None:
    inside = [memory.data_ptr() + place for place in _places(tensors)[:-1]]
    outside = [tensor.data_ptr() for tensor in tensors]
    targets, sources = (outside, inside) if out else (inside, outside)
    copy_spans(spans(targets, sources, [tensor.nbytes for tensor in tensors]), deadline)


class FreshSegments(Pair):
    """A new memory file in every round."""

    name = "fresh_segments"

    def hand_over(self, seat: Seat, deadline: Deadline) -> MemoryFile:
        """Copy into a new file."""
        tensors = seat.tensors()
        file = MemoryFile(_places(tensors)[-1], what=self.name)
        _copy(file.memory, tensors, deadline, out=False)
        self.channel.send({}, [file.fd], deadline=deadline)
        return file

    def take(self, seat: Seat, deadline: Deadline) -> None:
        """Copy out of it."""
        (descriptor,) = self.channel.receive(deadline).descriptors
        tensors = seat.tensors()
        memory = Mapping(descriptor, _places(tensors)[-1], what=self.name).window()
        _copy(memory, tensors, deadline, out=True)


class CopyInCopyOut(Pair):
    """One memory file of the whole size, mapped once by both."""

    name = "copy_in_copy_out"

    def prepare(self, seat: Seat, deadline: Deadline) -> None:
        """Make the file, or map it."""
        nbytes = _places(seat.tensors())[-1]
        if seat.sends:
            file = MemoryFile(nbytes, what=self.name)
            self._memory = file.memory
            self.channel.send({}, [file.fd], deadline=deadline)
        else:
            (descriptor,) = self.channel.receive(deadline).descriptors
            self._memory = Mapping(descriptor, nbytes, what=self.name).window()

    def hand_over(self, seat: Seat, deadline: Deadline) -> None:
        """Copy in."""
        _copy(self._memory, seat.tensors(), deadline, out=False)
        self.channel.send({}, deadline=deadline)

    def take(self, seat: Seat, deadline: Deadline) -> None:
        """Copy out."""
        self.channel.receive(deadline)
        _copy(self._memory, seat.tensors(), deadline, out=True)


class ProcessVmReadv(Pair):
    """The receiver reads the sender's memory."""

    name = "process_vm_readv"

    def hand_over(self, seat: Seat, deadline: Deadline) -> None:
        """Say where the tensors are."""
        addresses = [tensor.data_ptr() for tensor in seat.tensors()]
        file = MemoryFile(8 * len(addresses), what="addresses")
        file.memory.copy_(torch.tensor(addresses).view(torch.uint8))
        self.channel.send({}, [file.fd], deadline=deadline)

    def take(self, seat: Seat, deadline: Deadline) -> None:
        """Read them."""
        (descriptor,) = self.channel.receive(deadline).descriptors
        tensors = seat.tensors()
        addresses = Mapping(descriptor, 8 * len(tensors), what="addresses").window().view(torch.int64)
        for address, target in zip(addresses.tolist(), tensors, strict=True):
            deadline.check()
            copy_from(self.channel.credentials.pid, address, target.data_ptr(), target.nbytes)


class TorchSharing(Pair):
    """Fresh shared tensors, pickled by torch's reductions."""

    name = "torch_sharing"

    def prepare(self, seat: Seat, deadline: Deadline) -> None:
        """Share a multiprocessing connection."""
        init_reductions()  # type: ignore[no-untyped-call]
        if seat.sends:
            self._connection, far_end = multiprocessing.Pipe()
            with far_end:
                self.channel.send({}, [far_end.fileno()], deadline=deadline)
        else:
            (descriptor,) = self.channel.receive(deadline).descriptors
            self._connection = Connection(descriptor)

    def hand_over(self, seat: Seat, deadline: Deadline) -> list[torch.Tensor]:
        """Copy into shared tensors and send them."""
        shared = [_shared_copy(tensor) for tensor in seat.tensors()]
        self._connection.send(shared)
        return shared

    def take(self, seat: Seat, deadline: Deadline) -> None:
        """Receive and copy out."""
        if not self._connection.poll(deadline.remaining()):
            raise TransferError("the sender sent no tensors", transport=self.name)
        for target, source in zip(seat.tensors(), self._connection.recv(), strict=True):
            copy_bytes(as_bytes(target), as_bytes(source))

    def close(self, seat: Seat) -> None:
        """Hang up."""
        self._connection.close()
        super().close(seat)


def _shared_copy(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.UntypedStorage._new_shared(tensor.nbytes, device="cpu")  # type: ignore[no-untyped-call]
    fresh = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
    copy_bytes(as_bytes(fresh), as_bytes(tensor))
    return fresh


class Nixl(Pair):
    """The receiver reads into memory of its own that is registered once."""

    name = "nixl"

    def prepare(self, seat: Seat, deadline: Deadline) -> None:
        """Register the tensors, and have the receiver prepare to read those of the sender."""
        nixl = importlib.import_module("nixl._api")
        # Its thread for progress would spin on a core while the other ways are measured.
        config = nixl.nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
        self._agent = nixl.nixl_agent(f"{self.name}-{seat.rank}", config)
        module = seat.model if seat.sends else build_module(seat.payload)
        self._tensors = [module.get_parameter(name).data for name in seat.payload.names]
        self._registered = self._agent.register_memory(self._tensors, "DRAM")
        mine = self._agent.get_xfer_descs(self._tensors, "DRAM")
        if seat.sends:
            self._tell(self._agent.get_agent_metadata(), deadline)
            self._tell(self._agent.get_serialized_descs(mine), deadline)
        else:
            sender = self._agent.add_remote_agent(self._told(deadline))
            theirs = self._agent.deserialize_descs(self._told(deadline))
            self._transfer = self._agent.initialize_xfer("READ", mine, theirs, sender)

    def _tell(self, data: bytes, deadline: Deadline) -> None:
        file = MemoryFile(len(data), what=self.name)
        file.memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.channel.send({"bytes": len(data)}, [file.fd], deadline=deadline)

    def _told(self, deadline: Deadline) -> bytes:
        message = self.channel.receive(deadline)
        (descriptor,) = message.descriptors
        return bytes(Mapping(descriptor, message.record["bytes"], what=self.name).window().tolist())

    def held(self, seat: Seat) -> list[torch.Tensor]:
        """The registered tensors."""
        return self._tensors

    def hand_over(self, seat: Seat, deadline: Deadline) -> None:
        """Say that the receiver may read, and do the sender's part of UCX until it has."""
        self.channel.send({}, deadline=deadline)
        while not select.select([self.channel], [], [], _PAUSE_SECONDS)[0]:
            deadline.check()
            self._agent.get_new_notifs()

    def take(self, seat: Seat, deadline: Deadline) -> None:
        """Read."""
        self.channel.receive(deadline)
        state = self._agent.transfer(self._transfer)
        while state not in ("DONE", "ERR"):
            deadline.check()
            time.sleep(_PAUSE_SECONDS)
            state = self._agent.check_xfer_state(self._transfer)
        if state == "ERR":
            raise TransferError("NIXL could not read the sender's memory", transport=self.name)

    def close(self, seat: Seat) -> None:
        """Give up what is registered."""
        if not seat.sends:
            self._agent.release_xfer_handle(self._transfer)
        self._agent.deregister_memory(self._registered)
        super().close(seat)


def other_ways() -> tuple[list[Way], dict[str, str]]:
    """The ways that this machine has, and for each that it lacks why."""
    ways: list[Way] = [CopyInCopyOut(), FreshSegments(), TorchSharing()]
    skipped: dict[str, str] = {}
    if (reason := refusal()) is None:
        ways.append(ProcessVmReadv())
    else:
        skipped["process_vm_readv"] = f"skipped: {reason}"
    if importlib.util.find_spec("nixl") is not None:
        ways.append(Nixl())
    else:
        skipped["nixl"] = "skipped: it is not installed"
    return ways, skipped
