"""The two backends under a communicator. To both, a parcel is started and ends some time later.

gloo (CPU): one group of two ranks for each pair of a sender and a receiver, so that the failure of one peer is kept
from the others. The pieces of a parcel are sends and receives, which cost the least; but these cannot be waited for
in slices (a `wait` that runs out of time closes the connection) and do not tell whether they have ended. So a
broadcast of one byte follows them as a mark, whose `wait` does no harm: what one pair of ranks starts in the same
order on both sides gloo puts on their connection in that order, so when the mark has moved, so has all before it.

NCCL (CUDA): one group; a parcel is one coalesced batch of sends, which the group's own communicator carries.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Store

from weightwire import reaper
from weightwire.deadline import Deadline
from weightwire.errors import TransferError, WeightwireError
from weightwire.liveness import GAVE_UP, Liveness
from weightwire.traffic import Parcel, explain

_CONNECT_SECONDS = 10.0
_POLL_SECONDS = 0.0002
_STORE_SECONDS = 0.002
_THREADS = 32
_MARK_THREADS = 2

_c10d: Any = distributed  # its stubs leave out what groups are built from


class Wire(Protocol):
    """Connections to the other ranks."""

    def send(self, pieces: Sequence[Tensor], to: Sequence[int], timeout: float) -> Sequence[Parcel]:
        """Start sending `pieces`; returns one parcel for each destination, in order.

        Where one operation serves all destinations, `to` is any one of them.
        """

    def receive(self, pieces: Sequence[Tensor], sources: Sequence[int], timeout: float) -> Sequence[Parcel]:
        """Start receiving `pieces` from the only source; returns the only parcel."""

    def settled(self, work: Any, seconds: float) -> bool:
        """Wait up to `seconds` for an operation to end, well or not; returns whether it has."""

    def release(self) -> list[Any]:
        """Hand over the process groups, retained as `weightwire.reaper` says."""

    def abandon(self) -> None:
        """Ask all operations to end; called once, by the reaper."""


def connect(
    store: Any,
    *,
    rank: int,
    routes: Sequence[tuple[int, int]],
    collective: bool,
    device: torch.device,
    hostname: str,
    deadline: Deadline,
    labels: Sequence[str],
    liveness: Liveness,
    timeout: float,
    window: int,
) -> Wire:
    """Connect to all ranks that `routes` (sender, receiver) name together with this one.

    Args:
        store: A `torch.distributed.Store`.
        rank: This process.
        routes: The same on every rank.
        collective: Send by broadcast to all receivers of a sender.
        device: Decides the backend.
        hostname: Address to bind to.
        deadline: By when the connections must stand.
        labels: Every rank in words.
        liveness: Tells who is alive; closed if connecting fails.
        timeout: Longest time a single operation may take once a connection stands, in seconds.
        window: Operations that will be under way at a time, to or from one peer.

    Raises:
        PeerLost: A rank died or stopped while it connected.
        DeadlineExceeded: The deadline passed.
    """
    try:
        if device.type == "cuda":
            return NCCLWire(store, rank=rank, size=len(labels), collective=collective, device=device, timeout=timeout)
        # Every rank builds its groups in one total order, so that no two ranks wait for each other.
        groups = [members for members in _members(sorted(routes), collective) if rank in members]
        threads = max(2, min(4 * window, _THREADS // max(1, len(groups)))) if collective else _MARK_THREADS
        wire = GlooWire(rank, hostname, collective=collective, threads=threads)
        try:
            for members in groups:
                others = [peer for peer in members if peer != rank]
                _join(wire, _WatchedStore(store, others, liveness, deadline), members, labels)
        except BaseException:
            reaper.park(wire.release(), keep=[wire])
            raise
        return wire
    except BaseException:
        liveness.close(GAVE_UP)
        raise


def _members(routes: Sequence[tuple[int, int]], collective: bool) -> list[tuple[int, ...]]:
    if not collective:
        return list(routes)
    senders = dict.fromkeys(sender for sender, _ in routes)
    return [(sender, *(to for source, to in routes if source == sender)) for sender in senders]


class _WatchedStore(Store):
    """A store whose waits, inside gloo, end when they are given up, and not before.

    gloo's own timeout is no reason: it is short, for a connection between two that are both there, and who is waited
    for may itself wait for a third.
    """

    def __init__(self, store: Any, others: Sequence[int], liveness: Liveness, deadline: Deadline) -> None:
        super().__init__()
        self._store = store
        self._given_up = False
        self.others = others
        self.liveness = liveness
        self.deadline = deadline

    def watch(self) -> None:
        """Raise with the deadline, or with the death of a rank that is waited for."""
        self.deadline.check("connecting")
        self.liveness.poll()
        for failure in filter(None, map(self.liveness.failure, self.others)):
            raise failure

    def give_up(self) -> None:
        self._given_up = True

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not self._store.check(keys):
            if self._given_up or reaper.leaving():
                raise RuntimeError(f"gave up waiting for {keys}")
            time.sleep(_STORE_SECONDS)


def _join(wire: GlooWire, store: _WatchedStore, members: tuple[int, ...], labels: Sequence[str]) -> None:
    try:
        wire.join(store, members)
    except BaseException as error:
        store.give_up()
        if not isinstance(error, RuntimeError):
            raise
        store.deadline.check()
        if isinstance(error, WeightwireError):
            raise
        where = labels[wire.rank]
        raise explain(store.liveness, store.others, error, labels=labels, where=where) from error


class GlooWire:
    """gloo over TCP: for each sender, groups of which it is member 0.

    Args:
        rank: This process.
        hostname: Address to bind to.
        collective: Send every piece by a broadcast to all receivers.
        threads: Collectives of one group that are under way at a time; the others queue. Broadcasts of pieces of a
            few MiB need more than two to fill a connection (measured).

    Raises:
        TransferError: `hostname` cannot be bound to.
    """

    def __init__(self, rank: int, hostname: str, *, collective: bool, threads: int) -> None:
        self.rank = rank
        self._collective = collective
        self._threads = threads
        self._timeout = -1.0
        self._options: Any = None
        try:
            self._device: Any = _c10d.ProcessGroupGloo.create_device(hostname=hostname)
        except RuntimeError as error:
            raise TransferError(f"cannot bind to {hostname!r}: {error}") from error
        self._groups: list[Any] = []
        self._stores: list[Store] = []
        self._by_route: dict[tuple[int, int], Any] = {}

    def join(self, store: _WatchedStore, members: tuple[int, ...]) -> None:
        """Form the group of a sender and its receivers; waits until all are there.

        Raises:
            RuntimeError: gloo's; not all of them came.
            TransferError: What `store.watch` raised.
        """
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._timeout = timedelta(seconds=_CONNECT_SECONDS)
        options._threads = self._threads
        prefixed = _c10d.PrefixStore("group/" + "-".join(map(str, members)), store)
        place = members.index(self.rank)
        group = reaper.construct(
            lambda: _c10d.ProcessGroupGloo(prefixed, place, len(members), options), watch=store.watch
        )
        self._groups.append(group)
        self._stores.append(store)
        self._by_route |= {(members[0], to): group for to in members[1:]}

    def send(self, pieces: Sequence[Tensor], to: Sequence[int], timeout: float) -> Sequence[Parcel]:
        """Sends and a mark in the group of each destination; broadcasts in one group."""
        return [self._start((self.rank, peer), pieces, timeout) for peer in to]

    def receive(self, pieces: Sequence[Tensor], sources: Sequence[int], timeout: float) -> Sequence[Parcel]:
        """Receives and a mark, or broadcasts, in the source's group."""
        return [self._start((source, self.rank), pieces, timeout) for source in sources]

    def _start(self, route: tuple[int, int], pieces: Sequence[Tensor], timeout: float) -> Parcel:
        group = self._by_route[route]
        parcel = _parcel([], pieces)
        try:
            if self._collective:
                parcel.works.extend(self._broadcast(group, piece, timeout) for piece in pieces)
            else:
                start, peer = (group.send, 1) if route[0] == self.rank else (group.recv, 0)
                for piece in pieces:
                    parcel.keep.append(start([piece], peer, 0))
                mark = torch.empty(1, dtype=torch.uint8)
                parcel.works.append(self._broadcast(group, mark, timeout))
        except RuntimeError as error:  # the connection is known to be broken
            parcel.works.append(_Refused(error))
        return parcel

    def settled(self, work: Any, seconds: float) -> bool:
        """See `weightwire.reaper.settled`."""
        return reaper.settled(work, seconds)

    def release(self) -> list[Any]:
        """Forget the groups."""
        groups, self._groups = self._groups, []
        self._by_route.clear()
        self._device = None
        return groups

    def abandon(self) -> None:
        """Nothing reaches an operation of gloo: it ends with its peer or with its timeout."""

    def _broadcast(self, group: Any, piece: Tensor, timeout: float) -> Any:
        if timeout != self._timeout:
            self._timeout = timeout
            self._options = _c10d.BroadcastOptions()
            self._options.rootRank = 0
            self._options.timeout = timedelta(seconds=timeout)
        return group.broadcast([piece], self._options)


class _Refused:
    """An operation that could not be started."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> None:
        raise self._error


class NCCLWire:
    """One NCCL group of all ranks; work is ordered after the device's current stream.

    Args:
        store: A `torch.distributed.Store`.
        rank: This process.
        size: Number of ranks.
        collective: Send by broadcast over the whole group.
        device: A CUDA device.
        timeout: Backstop for one operation, in seconds.
    """

    def __init__(
        self, store: Any, *, rank: int, size: int, collective: bool, device: torch.device, timeout: float
    ) -> None:
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        self._group = _c10d.ProcessGroupNCCL(_c10d.PrefixStore("group/nccl", store), rank, size, options)
        reaper.retain(self._group)
        self._released: list[Any] = []
        self.rank = rank
        self._collective = collective
        # The communicator must stand before the first batch, in which not every rank takes part.
        self._group.eager_connect_single_device(device)

    def send(self, pieces: Sequence[Tensor], to: Sequence[int], timeout: float) -> Sequence[Parcel]:
        """One coalesced batch of sends, or broadcasts."""
        if self._collective:
            return [self._broadcasts(pieces, self.rank)]
        self._group._start_coalescing()
        for peer in to:
            for piece in pieces:
                self._group.send([piece], peer, 0)
        work = self._group._end_coalescing()
        return [_parcel([work], pieces) for _ in to]

    def receive(self, pieces: Sequence[Tensor], sources: Sequence[int], timeout: float) -> Sequence[Parcel]:
        """The counterpart of `send`."""
        (source,) = sources
        if self._collective:
            return [self._broadcasts(pieces, source)]
        self._group._start_coalescing()
        for piece in pieces:
            self._group.recv([piece], source, 0)
        return [_parcel([self._group._end_coalescing()], pieces)]

    def settled(self, work: Any, seconds: float) -> bool:
        """Ask CUDA, now and then."""
        until = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def release(self) -> list[Any]:
        """Forget the group."""
        self._released = [self._group]
        self._group = None
        return self._released

    def abandon(self) -> None:
        """Abort the group, which NCCL can."""
        while self._released:
            self._released.pop().abort()

    def _broadcasts(self, pieces: Sequence[Tensor], source: int) -> Parcel:
        options = _c10d.BroadcastOptions()
        options.rootRank = source
        return _parcel([self._group.broadcast([piece], options) for piece in pieces], pieces)


def _parcel(works: Sequence[Any], pieces: Sequence[Tensor]) -> Parcel:
    return Parcel(deque(works), sum(piece.numel() for piece in pieces), [])
