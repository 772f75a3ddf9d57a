"""Plain NIXL reads: what the transport is held against."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from weightwire.testing.measure import Seat, Way
from weightwire_rdt.nixl_agent import NixlAgent, Span, memory_of, process_agent, span_of

_SECONDS: Final = 60.0
_PAUSE: Final = 0.0005
_CPU: Final = memory_of(torch.device("cpu"))


def announce(agent: NixlAgent, tensors: Sequence[Tensor], path: Path) -> None:
    """Register some memory, and leave word of it in a file."""
    spans = [span_of(tensor) for tensor in tensors]
    agent.register(spans, _CPU)
    said = {"name": agent.name, "agent": base64.b64encode(agent.metadata()).decode(), "spans": spans}
    hidden = path.with_suffix(".part")
    hidden.write_text(json.dumps(said))
    hidden.rename(path)


def hear(agent: NixlAgent, path: Path) -> tuple[str, list[Span]]:
    """Wait for such a file, and get to know that agent; returns its name and memory.

    Raises:
        TimeoutError: It does not come.
    """
    until = time.monotonic() + _SECONDS
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no {path.name} for {_SECONDS:g} s")
        time.sleep(_PAUSE)
    said = json.loads(path.read_text())
    agent.meet(said["name"], base64.b64decode(said["agent"]))
    return said["name"], [Span(*span) for span in said["spans"]]


def read(agent: NixlAgent, reads: Sequence[tuple[str, Sequence[Span], Sequence[Span]]], box: str) -> None:
    """Read from several agents at once, in one transfer each; each is told."""
    going = [agent.read(name, here, there, (_CPU, _CPU)) for name, here, there in reads]
    while not all(one.done for one in going):
        time.sleep(_PAUSE)
    for name, _, _ in reads:
        agent.notify(name, box, b"")


def wait_for(agent: NixlAgent, box: str, count: int) -> None:
    """Wait until so many reads are done, so that what NIXL has to do at this end is done.

    Raises:
        TimeoutError: They are not.
    """
    until = time.monotonic() + _SECONDS
    while count > 0:
        count -= len(agent.take(box))
        if time.monotonic() > until:
            raise TimeoutError("nobody has read")
        time.sleep(_PAUSE)


def begin(agent: NixlAgent, box: str, *, others: Sequence[str], sends: bool) -> None:
    """Have both ends say something, so that the connection between them is made: only who polls makes progress."""
    for name in others:
        agent.notify(name, box, b"")
    wait_for(agent, box, len(others))
    if sends:
        for name in others:
            agent.notify(name, box, b"")
    else:
        wait_for(agent, box, len(others))


class RawNixl(Way):
    """One read of all tensors, from where the sender has them into tensors of the receiver's."""

    name = "raw_nixl"

    def connect(self, seat: Seat, offers: list[Any]) -> None:
        """Register the tensors, and get to know each other."""
        self._agent = process_agent()
        self._agent.open_box(self.name)
        directory = Path(seat.directory)
        # A receiver's parameters are other storage after each round of the transport.
        self._tensors = seat.tensors() if seat.sends else [torch.zeros_like(tensor) for tensor in seat.tensors()]
        announce(self._agent, self._tensors, directory / f"raw-{seat.rank}.json")
        others = range(1, seat.world) if seat.sends else (0,)
        heard = [hear(self._agent, directory / f"raw-{rank}.json") for rank in others]
        self._sender, self._there = heard[0]
        self._here = [span_of(tensor) for tensor in self._tensors]
        begin(self._agent, self.name, others=[name for name, _ in heard], sends=seat.sends)

    def held(self, seat: Seat) -> list[Tensor]:
        """What is read, or what was read into."""
        return self._tensors

    def step(self, seat: Seat) -> None:
        """Read, or be read from."""
        if seat.sends:
            wait_for(self._agent, self.name, seat.world - 1)
        else:
            read(self._agent, [(self._sender, self._here, self._there)], self.name)
