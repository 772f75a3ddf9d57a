"""The two backends under a communicator: what they have in common is that a piece goes out and ends some time later.

gloo (CPU): one group of two ranks for each pair of a sender and a receiver, and a piece is a broadcast in it. That
is as fast as gloo's send and recv (measured), numbers the pieces by itself, keeps the failure of one peer from the
others, and its operations, unlike send and recv, can be waited for in slices without harm.

NCCL (CUDA): one group; a piece is one coalesced batch of sends, so that the group's own communicator carries it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo

from weightwire import reaper
from weightwire.deadline import Deadline

CONNECT_SECONDS = 10.0
"""Longest wait for one gloo group to form, once its members are known to be alive, in seconds."""

_POLL_SECONDS = 0.0002


class Wire(Protocol):
    """A backend, connected."""

    groups: list[Any]
    """Process groups, retained (see `weightwire.reaper`)."""

    def send(self, piece: Tensor, to: Sequence[int], timeout: float) -> list[Any]:
        """Start sending `piece`; returns one operation for each destination, in order."""

    def receive(self, piece: Tensor, source: int, timeout: float) -> Any:
        """Start receiving `piece` from `source`; returns the operation."""

    def settled(self, work: Any, seconds: float) -> bool:
        """Wait up to `seconds` for an operation to end, well or not; returns whether it has."""

    def abandon(self) -> None:
        """Ask all operations to end; called once, by the reaper."""


class GlooWire:
    """gloo groups over TCP.

    Args:
        store: A `torch.distributed.Store`, empty under `group/`.
        rank: This process in the communicator.
        routes: Pairs (sender, receiver) with data between them, the same on every rank.
        collective: One group for each sender and all its receivers, instead of one for each pair.
        hostname: Address to bind to.
        deadline: By when the groups must stand.
        lost: Called with the peers of a group that did not form and gloo's words; returns what to raise.

    Raises:
        Exception: What `lost` returned.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        routes: Iterable[tuple[int, int]],
        collective: bool,
        hostname: str,
        deadline: Deadline,
        lost: Callable[[Sequence[int], str], BaseException],
    ) -> None:
        self.groups: list[Any] = []
        self._collective = collective
        self._by_members: dict[tuple[int, ...], Any] = {}
        self._device = ProcessGroupGloo.create_device(hostname=hostname)
        self._store = store
        # Every rank builds its groups in one total order, so that no two ranks wait for each other.
        for members in self._members(sorted(routes)):
            if rank in members:
                deadline.check()
                try:
                    self._build(members, rank, min(CONNECT_SECONDS, deadline.remaining()))
                except RuntimeError as error:
                    raise lost([peer for peer in members if peer != rank], str(error)) from error
        self._rank = rank

    def _members(self, routes: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
        if not self._collective:
            return list(routes)
        senders = dict.fromkeys(sender for sender, _ in routes)
        return [(sender, *(to for source, to in routes if source == sender)) for sender in senders]

    def _build(self, members: tuple[int, ...], rank: int, timeout: float) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._timeout = timedelta(seconds=max(timeout, 0.01))
        # Two pieces are under way at a time: one would leave the connection idle between pieces, more gain nothing.
        options._threads = 2
        store = PrefixStore("group/" + "-".join(map(str, members)), self._store)
        group = ProcessGroupGloo(store, members.index(rank), len(members), options)
        reaper.retain(group)
        self.groups.append(group)
        for peer in members[1:]:
            self._by_members[members[0], peer] = group

    def send(self, piece: Tensor, to: Sequence[int], timeout: float) -> list[Any]:
        if self._collective:
            return [self._broadcast(self._by_members[self._rank, to[0]], piece, timeout)] * len(to)
        return [self._broadcast(self._by_members[self._rank, peer], piece, timeout) for peer in to]

    def receive(self, piece: Tensor, source: int, timeout: float) -> Any:
        return self._broadcast(self._by_members[source, self._rank], piece, timeout)

    def settled(self, work: Any, seconds: float) -> bool:
        return reaper.settled(work, seconds)

    def abandon(self) -> None:
        """Nothing reaches an operation of gloo: it ends with its peer or with its timeout."""

    def _broadcast(self, group: Any, piece: Tensor, timeout: float) -> Any:
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout)
        return group.broadcast([piece], options)


class NCCLWire:
    """One NCCL group of all ranks.

    Args:
        store: A `torch.distributed.Store`, empty under `nccl/`.
        rank: This process in the communicator.
        world_size: Number of ranks.
        collective: Send by broadcast over the whole group.
        device: A CUDA device; pieces are on it, and work is ordered after its current stream.
        timeout: Backstop for one operation, in seconds.
    """

    def __init__(
        self, store: Any, *, rank: int, world_size: int, collective: bool, device: torch.device, timeout: float
    ) -> None:
        backend: Any = torch.distributed
        options = backend.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        group = backend.ProcessGroupNCCL(PrefixStore("nccl", store), rank, world_size, options)
        reaper.retain(group)
        self.groups: list[Any] = [group]
        self._group = group
        self._rank = rank
        self._collective = collective
        self._device = device
        # The communicator must stand before the first batch, in which not every rank takes part.
        group.eager_connect_single_device(device)

    def send(self, piece: Tensor, to: Sequence[int], timeout: float) -> list[Any]:
        if self._collective:
            return [self._broadcast(piece, self._rank)] * len(to)
        self._group._start_coalescing()
        for peer in to:
            self._group.send([piece], peer, 0)
        return [self._group._end_coalescing()] * len(to)

    def receive(self, piece: Tensor, source: int, timeout: float) -> Any:
        if self._collective:
            return self._broadcast(piece, source)
        self._group._start_coalescing()
        self._group.recv([piece], source, 0)
        return self._group._end_coalescing()

    def settled(self, work: Any, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def abandon(self) -> None:
        self._group.abort()

    def _broadcast(self, piece: Tensor, source: int) -> Any:
        options = BroadcastOptions()
        options.rootRank = source
        return self._group.broadcast([piece], options)
