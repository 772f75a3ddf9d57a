"""The data plane: bytes from one rank to others, in pieces, with nothing that can hang.

A `Communicator` moves messages, which are lists of 1-D uint8 buffers. Both sides cut them into the same pieces, and
the pieces into parcels, from the same numbers, so the plans of sender and receiver must agree before the first call:
gloo kills a process whose buffer is too small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from weightwire import faults, reaper
from weightwire.deadline import Deadline
from weightwire.errors import OrderError, TransferAborted
from weightwire.liveness import GAVE_UP, LEFT, Liveness
from weightwire.traffic import Flow, Parcel, Traffic
from weightwire.wires import Wire, connect

_BACKSTOP = 6.0
_RECEIVER_SECONDS = 0.5
_LEAVE_SECONDS = 5.0
_PARCEL_PIECES = 2
_SMALL_PARCELS = 4


class Handle:
    """Bytes on their way; made by `Communicator.send` and `receive`."""

    __slots__ = ("_marks", "_traffic")

    def __init__(self, traffic: Traffic, marks: list[tuple[Flow, int]]) -> None:
        self._traffic = traffic
        self._marks = marks

    @property
    def done(self) -> bool:
        """Whether every byte has moved, so that the buffer may be used again."""
        return all(self._traffic.advance(flow) >= mark for flow, mark in self._marks)

    def wait(self, deadline: Deadline) -> None:
        """Wait until every byte has moved.

        Raises:
            PeerLost: A peer died, left or (`PeerStalled`) stopped moving; named.
            PeerFailed: A peer gave up its side.
            DeadlineExceeded: The deadline passed.
            BaseException: Whatever the deadline was cancelled with, within 100 ms.
        """
        for flow, mark in self._marks:
            if not self._traffic.reached(flow, mark, deadline):
                flow.check()


class Communicator(ABC):
    """Ordered, unframed transfers between the ranks of one link.

    One thread transfers at a time; `retire`, `failed` and the handles' `done` may be used from any. Two ranks that
    both send more than a window to each other before they receive wait for each other, and are told so as a stall.
    """

    @abstractmethod
    def begin_round(self) -> None:
        """A round begins: the fault point `communicator.first_piece` is reached once more."""

    @abstractmethod
    def send(self, buffers: Sequence[Tensor], to: Sequence[int], *, deadline: Deadline) -> Handle:
        """Queue a message for every rank in `to`; blocks while a destination's window is full.

        A destination that fails on the way does not keep the others from getting all of it: the error comes after
        everything is queued for them.

        Args:
            buffers: Each 1-D, contiguous, uint8, on the communicator's device; not to be written until the handle is
                done.
            to: Ranks.
            deadline: Deadline of the public call.

        Raises:
            ValueError: Not such a buffer, or no such rank.
            PeerLost, PeerFailed, DeadlineExceeded: As `Handle.wait`.
        """

    @abstractmethod
    def receive(self, buffers: Sequence[Tensor], source: int, *, deadline: Deadline) -> Handle:
        """Have the next message from `source` written into `buffers`; blocks while its window is full.

        Args:
            buffers: As in `send`, and of the same numbers of bytes; undefined until the handle is done.
            source: A rank.
            deadline: Deadline of the public call.

        Raises:
            ValueError: Not such a buffer, or no such rank.
            PeerLost, PeerFailed, DeadlineExceeded: As `Handle.wait`.
        """

    @abstractmethod
    def flush(self, deadline: Deadline) -> None:
        """Wait for everything queued, with every peer that is still there; then raise for one that is not.

        Raises:
            PeerLost, PeerFailed, DeadlineExceeded: As `Handle.wait`.
        """

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Flush, say goodbye and free everything; idempotent. A communicator that failed is retired instead.

        Raises:
            PeerLost, PeerFailed, DeadlineExceeded: Something queued could not be finished; it is retired.
        """

    @abstractmethod
    def retire(self, keep: Iterable[object] = ()) -> None:
        """Give up, from any thread; returns at once and never raises.

        Late bytes may still arrive for a while, so no buffer that was given to `receive` may be used for another
        round. What is under way is kept alive, with `keep`, until it has ended.
        """

    def leave(self, keep: Iterable[object] = (), *, error: BaseException | None = None) -> None:
        """Close in order, or retire where something failed; `keep` as in `retire`.

        Args:
            keep: What late bytes may still arrive in.
            error: Why the transfer is over, if it failed elsewhere.

        Raises:
            PeerLost, PeerFailed, DeadlineExceeded: As `close`.
        """
        if error is not None or self.failed:
            self.retire(keep)
        else:
            self.close(Deadline(_LEAVE_SECONDS, what="the group to close"))

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether anything failed, so that ranks may be out of step and this object is good for nothing more."""


class TorchCommunicator(Communicator):
    """Over torch's process groups: gloo for CPU, NCCL for CUDA. The default process group is not involved.

    Construction is collective: it returns when all ranks that have data between them are connected.

    Args:
        store: A `torch.distributed.Store` that all ranks share and nobody used before; kept until `close`.
        rank: This process.
        world_size: Number of ranks.
        labels: Every rank in words, for messages.
        device: Device of all buffers.
        deadline: By when all must be connected.
        hostname: Address to bind to, under which the others reach this process.
        stall_limit: Seconds without a finished piece, while one is waited for, after which a peer is said to have
            stopped; a receiver waits half a second longer.
        piece_bytes: Buffers are cut into pieces of this size.
        window: Pieces under way to or from one peer; up to four times as many parcels when they are small.
        collective: Send by one broadcast to all receivers, instead of to each by itself.
        senders: Ranks that will send, while all others receive; None: everybody to everybody. Connections are made
            only where data can flow.
        routes: In place of `senders`, the pairs of a sender and a receiver between which data will flow.

    Raises:
        ValueError: Numbers that do not fit.
        DeadlineExceeded: Names the ranks that did not come.
        PeerLost: A rank died or stopped while it connected.
        TransferError: `hostname` cannot be bound to.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        labels: Sequence[str],
        device: torch.device | str,
        deadline: Deadline,
        hostname: str = "127.0.0.1",
        stall_limit: float = 5.0,
        piece_bytes: int = 16 << 20,
        window: int = 8,
        collective: bool = False,
        senders: Sequence[int] | None = None,
        routes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if not 0 <= rank < world_size == len(labels):
            raise ValueError(f"rank {rank} of {world_size} with {len(labels)} labels")
        _check_positive(stall_limit=stall_limit, piece_bytes=piece_bytes, window=window)
        self._store = store
        self._rank = rank
        self._device = torch.device(device)
        self._piece_bytes = piece_bytes
        self._window = window
        self._collective = collective
        self._longest = _BACKSTOP * stall_limit
        self._closed = False
        routes = _routes(range(world_size), senders) if routes is None else list(routes)
        self._outgoing, self._incoming = _flows(rank, routes, stall_limit, together=collective)
        peers = self._outgoing.keys() | self._incoming.keys()
        self._liveness = Liveness(store, rank=rank, peers=peers, labels=labels, hostname=hostname, deadline=deadline)
        self._wire: Wire = connect(
            store,
            rank=rank,
            routes=routes,
            collective=collective,
            device=self._device,
            hostname=hostname,
            deadline=deadline,
            labels=labels,
            liveness=self._liveness,
            timeout=self._longest,
            window=window,
        )
        self._traffic = Traffic(
            list(dict.fromkeys((*self._outgoing.values(), *self._incoming.values()))),
            self._liveness,
            self._wire.settled,
            labels=labels,
            rank=rank,
        )
        try:
            faults.reach("communicator.connected")
        except BaseException:
            self.retire()
            raise

    def begin_round(self) -> None:
        """Let the next piece that moves be the first of a round."""
        self._traffic.round_is_new = True

    def send(self, buffers: Sequence[Tensor], to: Sequence[int], *, deadline: Deadline) -> Handle:
        """See `Communicator.send`."""
        flows = self._known(self._outgoing, to)
        if self._collective and len(to) != len(self._outgoing):
            raise ValueError(f"a collective send goes to all of {sorted(self._outgoing)}, not to {list(to)}")
        return self._queue(buffers, flows, self._wire.send, deadline)

    def receive(self, buffers: Sequence[Tensor], source: int, *, deadline: Deadline) -> Handle:
        """See `Communicator.receive`."""
        return self._queue(buffers, self._known(self._incoming, [source]), self._wire.receive, deadline)

    def _known(self, known: dict[int, Flow], peers: Sequence[int]) -> list[Flow]:
        if not peers or len(set(peers)) != len(peers) or not known.keys() >= set(peers):
            raise ValueError(f"rank {self._rank} has such data with ranks {sorted(known)}, not with {list(peers)}")
        return list(dict.fromkeys(known[peer] for peer in peers))

    def _queue(
        self,
        buffers: Sequence[Tensor],
        flows: list[Flow],
        start: Callable[[Sequence[Tensor], Sequence[int], float], Sequence[Parcel]],
        deadline: Deadline,
    ) -> Handle:
        for buffer in buffers:
            self._check_buffer(buffer)
        traffic = self._traffic
        traffic.check()
        for pieces in _parcels(buffers, self._piece_bytes):
            ready = [flow for flow in flows if self._has_room(flow, deadline)]
            if not ready:
                break
            with traffic.lock:
                if self._closed:
                    break
                timeout = min(deadline.remaining() + 1.0, self._longest)
                for flow, parcel in zip(ready, start(pieces, [flow.peers[0] for flow in ready], timeout), strict=True):
                    parcel.keep.append(pieces)
                    traffic.post(flow, parcel)
        for flow in flows:
            flow.check()
        traffic.check()
        return Handle(traffic, [(flow, flow.posted) for flow in flows])

    def _has_room(self, flow: Flow, deadline: Deadline) -> bool:
        nbytes, parcels = self._window * self._piece_bytes, self._window * _SMALL_PARCELS
        return self._traffic.has_room(flow, nbytes=nbytes, parcels=parcels, deadline=deadline)

    def _check_buffer(self, buffer: Tensor) -> None:
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(
                f"a buffer is 1-D, contiguous and uint8, not {buffer.dtype} of shape {tuple(buffer.shape)} "
                f"and strides {buffer.stride()}: see weightwire.source.as_bytes"
            )
        if buffer.device.type != self._device.type:
            raise ValueError(f"a buffer on {buffer.device} for a communicator on {self._device}")

    def flush(self, deadline: Deadline) -> None:
        """See `Communicator.flush`."""
        traffic = self._traffic
        traffic.check()
        for flow in traffic.flows:
            traffic.reached(flow, flow.posted, deadline)
        for flow in traffic.flows:
            flow.check()

    def close(self, deadline: Deadline) -> None:
        """See `Communicator.close`."""
        if not self._closed and not self.failed:
            try:
                self.flush(deadline)
            except BaseException:
                self.retire()
                raise
            with self._traffic.lock:
                self._closed = True
                self._traffic.stop(OrderError("the communicator is closed"))
            self._liveness.close(LEFT)
            reaper.destroy(self._wire.release())
            self._store = None
        self.retire()

    def retire(self, keep: Iterable[object] = ()) -> None:
        """See `Communicator.retire`."""
        with self._traffic.lock:
            if self._closed:
                return
            self._closed = True
            pending = self._traffic.stop(TransferAborted("the communicator was retired"))
        self._liveness.close(GAVE_UP)
        works = [work for parcel in pending for work in parcel.works]
        reaper.park(
            self._wire.release(),
            works=works,
            keep=[*keep, pending, self._wire, self._store],
            abandon=self._wire.abandon,
        )
        self._store = None

    @property
    def failed(self) -> bool:
        """Whether a peer was lost, a deadline passed or it was retired."""
        error = self._traffic.error
        return any(flow.error for flow in self._traffic.flows) or not isinstance(error, OrderError | None)


def _routes(ranks: range, senders: Sequence[int] | None) -> list[tuple[int, int]]:
    if senders is None:
        return [(sender, to) for sender in ranks for to in ranks if sender != to]
    if not senders or len(set(senders)) != len(senders) or not set(senders) <= set(ranks):
        raise ValueError(f"senders {list(senders)} are not distinct ranks of {len(ranks)}")
    return [(sender, to) for sender in senders for to in ranks if to not in senders]


def _parcels(buffers: Sequence[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    """Cut buffers into pieces, and gather these until a parcel is full; what is left over is the last parcel."""
    pieces: list[Tensor] = []
    nbytes = 0
    for buffer in buffers:
        for start in range(0, buffer.numel(), piece_bytes):
            piece = buffer if buffer.numel() <= piece_bytes else buffer[start : start + piece_bytes]
            pieces.append(piece)
            nbytes += piece.numel()
            if nbytes >= _PARCEL_PIECES * piece_bytes:
                yield pieces
                pieces, nbytes = [], 0
    if pieces:
        yield pieces


def _flows(
    rank: int, routes: list[tuple[int, int]], stall_limit: float, *, together: bool
) -> tuple[dict[int, Flow], dict[int, Flow]]:
    """What goes to and what comes from each peer; `together`: one flow to all receivers."""
    receivers = [to for sender, to in routes if sender == rank]
    everybody = Flow(tuple(receivers), stall_limit)
    outgoing = {to: everybody if together else Flow((to,), stall_limit) for to in receivers}
    # A sender that waits for a stopped receiver keeps the others waiting too: it shall be the first to speak.
    patience = stall_limit + _RECEIVER_SECONDS
    return outgoing, {sender: Flow((sender,), patience) for sender, to in routes if to == rank}


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if number <= 0:
            raise ValueError(f"{name} is {number}, not positive")
