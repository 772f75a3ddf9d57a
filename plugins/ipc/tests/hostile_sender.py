"""The sender's end of a connection, for tests that say what no sender says."""

from __future__ import annotations

import array
import json
import os
import socket
from typing import Any

import torch
from torch import nn

from weightwire.checksums import Checksums
from weightwire.deadline import Deadline
from weightwire.module_sink import ModuleSink
from weightwire.sink import UpdateSpec
from weightwire.source import ModuleSource
from weightwire_ipc.channel import Channel, Signal, wait_any
from weightwire_ipc.intake import Intake
from weightwire_ipc.landing import Landing
from weightwire_ipc.memory import MemoryFile
from weightwire_ipc.table import Layout

SECONDS = 2.0
SLOT, COUNT = 256, 2


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(16))
        self.second = nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))


class Sender:
    """The sender's end of a connection, and everything behind the worker's."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.model = Small()
        self.metas = ModuleSource(self.model).metadata
        self.nbytes = Layout(self.metas, align=64).nbytes
        self.intake = Intake(Channel(theirs, "trainer rank 0"), list(enumerate(self.metas)), torch.device("cpu"))
        self.sink = ModuleSink(self.model)
        self.sink.begin(UpdateSpec(metadata=tuple(self.metas)))
        checksums, self.deadline = Checksums(enabled=False), Deadline(SECONDS, what="the round")
        names = [meta.name for meta in self.metas]
        self.intake.expect(0, Landing(self.sink, names, torch.device("cpu"), checksums, self.deadline))

    def say(self, record: dict[str, Any] | list[Any] | bytes, *descriptors: int) -> None:
        """Send, and close the descriptors here."""
        data = record if isinstance(record, bytes) else json.dumps(record).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self.socket.sendmsg([data], rights)
        for fd in descriptors:
            os.close(fd)

    def segment(self, number: int = 0, nbytes: int | None = None) -> None:
        self.say({"segment": number, "memory": self.nbytes if nbytes is None else nbytes}, memory(self.nbytes))

    def table(self, rows: list[list[int]], length: int | None = None) -> None:
        content = torch.tensor(rows, dtype=torch.int64).reshape(-1).view(torch.uint8)
        self.say({"table": len(rows) if length is None else length}, memory(len(content), content))

    def ring(self) -> tuple[Signal, Signal]:
        """A good ring; returns the sender's signals."""
        filled, free = Signal(), Signal(count=COUNT)
        self.say({"ring": SLOT, "count": COUNT}, memory(SLOT * COUNT), os.dup(filled.fd), os.dup(free.fd))
        return filled, free

    def listen(self) -> None:
        """Have the worker's side go through its round."""
        while not self.intake.advance(self.deadline):
            wait_any(self.intake.waits_for(), self.deadline, "the sender")

    def close(self) -> None:
        self.intake.close()
        self.socket.close()
        self.sink.abort()


def memory(nbytes: int, content: torch.Tensor | None = None) -> int:
    """A sealed memory file."""
    file = MemoryFile(nbytes, what="a test")
    if content is not None:
        file.memory.copy_(content)
    fd = os.dup(file.fd)
    file.close()
    return fd
