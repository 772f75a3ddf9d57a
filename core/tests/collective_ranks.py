"""What the ranks of the communicator tests do; functions for `Rank.call`."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from weightwire import reaper
from weightwire.collective import Handle, TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.errors import TransferAborted, WeightwireError
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool import Rank

State = dict[str, Any]

KIB, MIB = 1 << 10, 1 << 20


def connect(state: State, rank: int, world: int, store: str, seconds: float = 20.0, **options: Any) -> None:
    """Make `state["communicator"]`."""
    state["communicator"] = TorchCommunicator(
        FileStore(store, world),
        rank=rank,
        world_size=world,
        labels=[f"rank {other}" for other in range(world)],
        device="cpu",
        deadline=Deadline(seconds),
        **options,
    )


def content(size: int, seed: int) -> torch.Tensor:
    """`size` random bytes that every rank can make."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def send(state: State, sizes: list[int], to: list[int], seconds: float = 20.0) -> None:
    """Send buffers of these sizes, all under way together."""
    communicator: TorchCommunicator = state["communicator"]
    deadline = state["deadline"] = Deadline(seconds)
    communicator.begin_round()
    buffers = [content(size, seed) for seed, size in enumerate(sizes)]
    handles = [communicator.send([buffer], to, deadline=deadline) for buffer in buffers]
    for handle in handles:
        handle.wait(deadline)
        assert handle.done


def receive(state: State, sizes: list[int], source: int, seconds: float = 20.0) -> bool:
    """The other side of `send`; returns whether all bytes are as sent."""
    communicator: TorchCommunicator = state["communicator"]
    deadline = state["deadline"] = Deadline(seconds)
    communicator.begin_round()
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    handles = [communicator.receive([buffer], source, deadline=deadline) for buffer in buffers]
    for handle in handles:
        handle.wait(deadline)
        assert handle.done
    return all(torch.equal(buffer, content(buffer.numel(), seed)) for seed, buffer in enumerate(buffers))


def send_zeros(state: State, size: int, to: list[int], seconds: float = 20.0) -> None:
    """Send `size` bytes, cheap to make."""
    deadline = state["deadline"] = Deadline(seconds)
    state["communicator"].begin_round()
    state["communicator"].send([torch.zeros(size, dtype=torch.uint8)], to, deadline=deadline).wait(deadline)


def receive_zeros(state: State, size: int, source: int, seconds: float = 20.0) -> bool:
    """Receive what `send_zeros` sends over ones; returns whether none are left."""
    deadline = state["deadline"] = Deadline(seconds)
    buffer = torch.ones(size, dtype=torch.uint8)
    state["communicator"].begin_round()
    state["communicator"].receive([buffer], source, deadline=deadline).wait(deadline)
    return not buffer.view(torch.int64 if size % 8 == 0 else torch.uint8).any()


def post_receive(state: State, size: int, source: int) -> None:
    """Queue a receive and let it be; it fits the window."""
    state["buffer"] = torch.ones(size, dtype=torch.uint8)
    state["handle"] = state["communicator"].receive([state["buffer"]], source, deadline=Deadline(10))


def finish_receive(state: State) -> bool:
    """Wait for `post_receive`'s bytes; returns whether no ones are left."""
    handle: Handle = state["handle"]
    handle.wait(Deadline(10))
    return not state["buffer"].any()


def cancel(state: State) -> float:
    """Cancel the call that runs here; returns when, on the clock all processes share."""
    state["deadline"].cancel(TransferAborted("somebody called abort"))
    return time.monotonic()


def failed(state: State) -> bool:
    """Whether the communicator says so."""
    result: bool = state["communicator"].failed
    return result


def close(state: State, seconds: float = 10.0) -> None:
    """Close and forget the communicator."""
    state.pop("communicator").close(Deadline(seconds))


def retire(state: State) -> int:
    """Retire and forget the communicator; returns how many are parked."""
    state.pop("communicator").retire()
    return reaper.parked_count()


def receive_and_retire(state: State, size: int, source: int) -> str:
    """Retire with a receive under way, keeping only a weak reference to its buffer; returns why it ended."""
    buffer = torch.ones(size, dtype=torch.uint8)
    state["weak"] = weakref.ref(buffer.untyped_storage())
    state["communicator"].begin_round()
    try:
        state["communicator"].receive([buffer], source, deadline=Deadline(20)).wait(Deadline(20))
    except WeightwireError as error:
        words = f"{type(error).__name__}: {error}"
    retire(state)
    return words


def reaped(state: State, seconds: float = 20.0) -> None:
    """Wait until nothing is parked here."""
    reaper.wait_until_empty(Deadline(seconds))


def resources(state: State) -> tuple[int, int]:
    """Threads and open descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def settle_at(state: State, expected: tuple[int, int]) -> tuple[int, int]:
    """`resources`, once as expected or after 5 s: the kernel's thread outlives its join a little."""
    until = time.monotonic() + 5
    while (now := resources(state)) != expected and time.monotonic() < until:
        time.sleep(0.01)
    return now


def connected(ranks: BorrowRanks, count: int, path: Path, name: str = "store", **options: Any) -> list[Rank]:
    """`count` ranks with a communicator."""
    lent = ranks(count)
    connect_all(lent, path / name, **options)
    return lent


def connect_all(ranks: list[Rank], store: Path, **options: Any) -> None:
    """Give these ranks a communicator."""
    calls = [rank.start(connect, number, len(ranks), str(store), **options) for number, rank in enumerate(ranks)]
    for call in calls:
        call.result()


def close_all(ranks: list[Rank]) -> None:
    """Close their communicators, all at once."""
    for call in [rank.start(close) for rank in ranks]:
        call.result()
