"""What a rank does in a benchmark: hold the payload, take its seat in every way, step, and weigh itself."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weightwire.source import as_bytes
from weightwire.testing.payload import Payload, build_module, digest, randomize

State = dict[str, Any]

_SAMPLE_SECONDS = 0.005


@dataclass(slots=True, kw_only=True)
class Seat:
    """Where a way runs: one rank of a case.

    Attributes:
        rank: 0 sends, the others receive.
        world: Ranks in all.
        payload: What is moved.
        directory: An empty directory that all ranks of this case see.
    """

    rank: int
    world: int
    payload: Payload
    directory: str
    _model: nn.Module | None = None
    _parameters: list[nn.Parameter] = field(default_factory=list)
    _flat: torch.Tensor | None = None

    @property
    def sends(self) -> bool:
        """Whether this is the sender."""
        return self.rank == 0

    @property
    def model(self) -> nn.Module:
        """A module with the payload's parameters, random on the sender; all ways of a rank share it."""
        if self._model is None:
            self._model = build_module(self.payload, seed=0 if self.sends else None)
        return self._model

    def tensors(self) -> list[torch.Tensor]:
        """The model's parameters as they are now, in the payload's order."""
        if not self._parameters:
            found = dict(self.model.named_parameters())
            self._parameters += [found[name] for name in self.payload.names]
        return [parameter.data for parameter in self._parameters]

    def flat(self) -> torch.Tensor:
        """One tensor (1-D uint8) of the payload's size, random on the sender; all ways share it.

        It lies in ordinary memory as the model's parameters do, so that raw transfers and ours read the same pages.
        """
        if self._flat is None:
            self._flat = torch.zeros(self.payload.nbytes, dtype=torch.uint8)
            if self.sends:
                randomize(self._flat, torch.Generator().manual_seed(0))
        return self._flat


class Way:
    """One way of moving the payload from rank 0 to all other ranks.

    An instance is copied to every rank and lives there as long as the case: keep what `connect` makes on `self`.
    The order is `offer` on the receivers, `connect` on all at once, then many rounds of `step` on all at once.

    Attributes:
        name: Its name within the case.
        weighed_rounds: Rounds over which its peak memory is measured, in processes of their own; a transport with
            two sets of staging has them both in the third.
    """

    name: str
    weighed_rounds: int = 3

    def offer(self, seat: Seat) -> Any:
        """On each receiver, before anything else: what the sender must know of it (an address), picklable."""
        return None

    def connect(self, seat: Seat, offers: list[Any]) -> None:
        """On all ranks at once; `offers` are those of ranks 1, 2, ... in order."""

    def warm(self, seat: Seat) -> None:
        """On all ranks, before the first round: touch what `step` must not be timed touching."""
        seat.tensors()

    def refresh(self, seat: Seat) -> None:
        """On the sender, before each round: change what will be sent, so that no older round can pass for this one.

        By default every byte of what `held` returns.
        """
        for tensor in self.held(seat):
            as_bytes(tensor).add_(1)

    def step(self, seat: Seat) -> Mapping[str, Any] | None:
        """On all ranks at once, timed: move the payload, or on a receiver that receives by itself do nothing.

        Returns:
            Figures for `Run.extras`, if there are any.
        """
        raise NotImplementedError

    def held(self, seat: Seat) -> list[torch.Tensor]:
        """The tensors that are sent, or that were received."""
        return seat.tensors()

    def digests(self, seat: Seat) -> list[str]:
        """Digests to compare after every round: all of all ranks must be equal."""
        return [digest(self.held(seat))]

    def close(self, seat: Seat) -> None:
        """On all ranks at once, after the last round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One timed step of one rank: `time.monotonic()` at both ends (one clock for all processes), and its figures."""

    began: float
    ended: float
    extras: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Resident memory of one process in bytes: before it held anything, and at its peak during a step."""

    idle: int
    peak: int


def sit(state: State, seat: Seat) -> None:
    """Take a seat, which holds nothing yet."""
    state["idle"] = _status("VmRSS")
    state["seat"], state["ways"] = seat, {}


def offer(state: State, way: Way) -> Any:
    """Bring a way to this rank."""
    state["ways"][way.name] = way
    return way.offer(state["seat"])


def connect(state: State, way: Way, offers: list[Any]) -> None:
    """Connect a way and touch what it holds; brings it first on the sender, which makes no offer."""
    seat, mine = state["seat"], state["ways"].setdefault(way.name, way)
    mine.connect(seat, offers)
    mine.warm(seat)
    gc.collect()
    gc.freeze()


def refresh(state: State, name: str) -> None:
    """`Way.refresh` of this rank."""
    state["ways"][name].refresh(state["seat"])


def step(state: State, name: str, at: float) -> Step:
    """Run one step, beginning at `at` on the clock of `time.monotonic()`."""
    way, seat = state["ways"][name], state["seat"]
    time.sleep(max(0.0, at - time.monotonic()))
    began = time.monotonic()
    extras = way.step(seat)
    return Step(began=began, ended=time.monotonic(), extras=extras or {})


def weighed_step(state: State, name: str) -> Weight:
    """Run one step and tell the peak of this process's resident memory."""
    with _peak_of() as peak:
        step(state, name, 0.0)
    return Weight(idle=state["idle"], peak=peak[0])


def digests(state: State, name: str) -> list[str]:
    """`Way.digests` of this rank."""
    found: list[str] = state["ways"][name].digests(state["seat"])
    return found


def close(state: State, name: str) -> None:
    """End a way."""
    state["ways"].pop(name).close(state["seat"])
    gc.unfreeze()


@contextlib.contextmanager
def _peak_of() -> Iterator[list[int]]:
    """Yields a list that holds the peak resident bytes of the block once it is left."""
    found: list[int] = []
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the high-water mark falls to what is resident now
    except OSError:
        with _sampled() as samples:
            yield found
        found.append(max(samples))
        return
    yield found
    found.append(_status("VmHWM"))


@contextlib.contextmanager
def _sampled() -> Iterator[list[int]]:
    """Yields resident bytes sampled every 5 ms, for systems where the high-water mark cannot be reset."""
    samples = [_status("VmRSS")]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            samples.append(_status("VmRSS"))

    thread = threading.Thread(target=sample, name="memory-sampler", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
        samples.append(_status("VmRSS"))


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
