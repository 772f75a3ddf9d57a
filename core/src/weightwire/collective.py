"""The data plane: bytes from one rank to others, in pieces, with nothing that can hang.

A `Communicator` moves 1-D uint8 buffers. Both sides cut a buffer into the same pieces from the same number, so the
plans of sender and receiver must agree before the first call: gloo kills a process whose buffer is too small.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weightwire import faults, reaper
from weightwire.deadline import Deadline
from weightwire.errors import OrderError, PeerLost, PeerStalled, TransferError
from weightwire.liveness import GAVE_UP, LEFT, Liveness
from weightwire.wires import GlooWire, NCCLWire, Wire

_SLICE = 0.02
_BACKSTOP = 6.0
_NEWS_MILLISECONDS = 200


class Handle:
    """Bytes on their way."""

    __slots__ = ("_communicator", "_marks")

    def __init__(self, communicator: TorchCommunicator, marks: list[tuple[_Link, int]]) -> None:
        self._communicator = communicator
        self._marks = marks

    @property
    def done(self) -> bool:
        """Whether every byte has moved, so that the buffer may be used again."""
        return all(self._communicator._advance(link) >= mark for link, mark in self._marks)

    def wait(self, deadline: Deadline) -> None:
        """Wait until every byte has moved.

        Raises:
            PeerLost: A peer died, left or (`PeerStalled`) stopped moving; named.
            PeerFailed: A peer gave up its side.
            DeadlineExceeded: The deadline passed.
            BaseException: Whatever the deadline was cancelled with, within 100 ms.
        """
        for link, mark in self._marks:
            if not self._communicator._reached(link, mark, deadline):
                raise link.failure()


class Communicator(ABC):
    """Ordered, unframed transfers between the ranks of one link. Not to be used from two threads at once, but for
    `retire`, `failed` and the handles' `done`."""

    @abstractmethod
    def begin_round(self) -> None:
        """A round begins (named fault points count from here)."""

    @abstractmethod
    def send(self, buffer: Tensor, to: Sequence[int], *, deadline: Deadline, keep: object = None) -> Handle:
        """Queue `buffer` for every rank in `to`; blocks while a destination's window is full.

        A destination that fails on the way does not keep the others from getting all of it: the error comes after
        everything is queued for them.

        Args:
            buffer: 1-D, contiguous, uint8, on the communicator's device; not to be written until the handle is done.
            to: Ranks.
            deadline: Deadline of the public call.
            keep: Anything that must live until the bytes have moved.

        Raises:
            ValueError: Not such a buffer, or no such rank.
            PeerLost, PeerFailed, DeadlineExceeded: As `Handle.wait`.
        """

    @abstractmethod
    def receive(self, buffer: Tensor, source: int, *, deadline: Deadline) -> Handle:
        """Have the next bytes from `source` written into `buffer`; blocks while too many pieces are expected.

        Args:
            buffer: As in `send`, and of the same number of bytes; undefined until the handle is done.
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

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether anything failed, so that ranks may be out of step and this object is good for nothing more."""


@dataclass(slots=True, eq=False)
class _Link:
    """What is under way with one peer in one direction; pieces are counted from 1 and end in order."""

    peer: int
    pending: deque[tuple[Any, Tensor, object]] = field(default_factory=deque)
    posted: int = 0
    ended: int = 0
    moved: float = 0.0
    error: TransferError | None = None

    def failure(self) -> TransferError:
        assert self.error is not None
        return self.error


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
            stopped.
        piece_bytes: Buffers are cut into pieces of this size.
        window: Pieces under way to or from one peer.
        collective: Send by one broadcast to all receivers, instead of to each by itself.
        senders: Ranks that will send, all others receive; None: everybody to everybody. Connections are made only
            where data can flow.

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
    ) -> None:
        if not (0 <= rank < world_size == len(labels)):
            raise ValueError(f"rank {rank} of {world_size} with {len(labels)} labels")
        if piece_bytes < 1 or window < 1 or stall_limit <= 0:
            raise ValueError(f"piece_bytes {piece_bytes}, window {window} and stall_limit {stall_limit} must be positive")
        self._store = store
        self._rank = rank
        self._labels = tuple(labels)
        self._device = torch.device(device)
        self._stall_limit = stall_limit
        self._piece_bytes = piece_bytes
        self._window = window
        self._collective = collective
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._closed = False
        self._round_is_new = False
        routes = _routes(range(world_size), senders)
        self._outgoing = {to: _Link(to) for sender, to in routes if sender == rank}
        self._incoming = {sender: _Link(sender) for sender, to in routes if to == rank}
        self._liveness = Liveness(
            store,
            rank=rank,
            peers=self._outgoing.keys() | self._incoming.keys(),
            labels=self._labels,
            hostname=hostname,
            deadline=deadline,
        )
        try:
            self._wire = self._connect(routes, hostname, deadline)
        except BaseException:
            self._liveness.close(GAVE_UP)
            raise
        try:
            faults.reach("communicator.connected")
        except BaseException:
            self.retire()
            raise

    def _connect(self, routes: list[tuple[int, int]], hostname: str, deadline: Deadline) -> Wire:
        backstop = _BACKSTOP * self._stall_limit
        if self._device.type == "cuda":
            return NCCLWire(
                self._store,
                rank=self._rank,
                world_size=len(self._labels),
                collective=self._collective,
                device=self._device,
                timeout=backstop,
            )

        def lost(peers: Sequence[int], words: str) -> BaseException:
            deadline.check()
            return self._explain(peers, words)

        return GlooWire(
            self._store,
            rank=self._rank,
            routes=routes,
            collective=self._collective,
            hostname=hostname,
            deadline=deadline,
            lost=lost,
        )

    def begin_round(self) -> None:
        self._round_is_new = True

    def send(self, buffer: Tensor, to: Sequence[int], *, deadline: Deadline, keep: object = None) -> Handle:
        links = self._links(self._outgoing, to)
        if self._collective and len(set(to)) != len(self._outgoing):
            raise ValueError(f"a collective send goes to all of {sorted(self._outgoing)}, not to {list(to)}")

        def post(piece: Tensor, links: list[_Link], timeout: float) -> list[Any]:
            return self._wire.send(piece, [link.peer for link in links], timeout)

        return self._queue(buffer, links, post, deadline, keep)

    def receive(self, buffer: Tensor, source: int, *, deadline: Deadline) -> Handle:
        def post(piece: Tensor, links: list[_Link], timeout: float) -> list[Any]:
            return [self._wire.receive(piece, source, timeout)]

        return self._queue(buffer, self._links(self._incoming, [source]), post, deadline, None)

    def _links(self, known: dict[int, _Link], peers: Sequence[int]) -> list[_Link]:
        if not peers or len(set(peers)) != len(peers) or not known.keys() >= set(peers):
            raise ValueError(f"rank {self._rank} has such data with ranks {sorted(known)}, not with {list(peers)}")
        return [known[peer] for peer in peers]

    def _queue(
        self,
        buffer: Tensor,
        links: list[_Link],
        post: Callable[[Tensor, list[_Link], float], list[Any]],
        deadline: Deadline,
        keep: object,
    ) -> Handle:
        self._check_buffer(buffer)
        if self._error is not None:
            raise self._error
        pieces = buffer.split(self._piece_bytes) if buffer.numel() else ()
        for piece in pieces:
            ready = [link for link in links if self._reached(link, link.posted - self._window + 1, deadline)]
            if not ready or (self._collective and len(ready) < len(links)):
                break
            with self._lock:
                works = post(piece, ready, min(deadline.remaining() + 1.0, _BACKSTOP * self._stall_limit))
                for link, work in zip(ready, works, strict=True):
                    if not link.pending:
                        link.moved = time.monotonic()
                    link.pending.append((work, piece, keep))
                    link.posted += 1
        for link in links:
            if link.error is not None:
                raise link.error
        return Handle(self, [(link, link.posted) for link in links])

    def _check_buffer(self, buffer: Tensor) -> None:
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(
                f"a buffer is 1-D, contiguous and uint8, not {buffer.dtype} of shape {tuple(buffer.shape)} "
                f"and strides {buffer.stride()}: see weightwire.source.as_bytes"
            )
        if buffer.device.type != self._device.type:
            raise ValueError(f"a buffer on {buffer.device} for a communicator of {self._device}")

    def _advance(self, link: _Link) -> int:
        """Take note of what has ended on `link`; returns the number of the last piece that ended well."""
        first = False
        with self._lock:
            while link.error is None and link.pending and link.pending[0][0].is_completed():
                try:
                    link.pending[0][0].wait()
                except RuntimeError as error:
                    link.error = self._explain([link.peer], str(error))
                    link.error.__cause__ = error
                    break
                link.pending.popleft()
                link.ended += 1
                link.moved = time.monotonic()
                first, self._round_is_new = first or self._round_is_new, False
        if first:
            faults.reach("communicator.first_piece")
        return link.ended

    def _reached(self, link: _Link, mark: int, deadline: Deadline) -> bool:
        """Wait until piece `mark` of `link` has ended well; False if its peer failed."""
        began = time.monotonic()
        try:
            while self._advance(link) < mark:
                if link.error is not None:
                    return False
                if self._error is not None:
                    raise self._error
                deadline.check(f"the transfer with {self._labels[link.peer]}")
                oldest = link.pending[0][0]
                if not self._wire.settled(oldest, min(_SLICE, deadline.remaining())):
                    self._watch(link, began)
        except BaseException as error:
            self._error = self._error or error
            raise
        return True

    def _watch(self, link: _Link, began: float) -> None:
        self._liveness.poll()
        idle = time.monotonic() - max(link.moved, began)
        if (failure := self._liveness.failure(link.peer)) is not None:
            link.error = failure
        elif idle > self._stall_limit:
            link.error = PeerStalled(
                f"{self._labels[link.peer]} has not moved a byte for {idle:.1f} s", rank=self._labels[self._rank]
            )

    def _explain(self, peers: Sequence[int], words: str) -> TransferError:
        """Say in our words why gloo failed: the connection that broke tells who, a little later than gloo."""
        self._liveness.poll(_NEWS_MILLISECONDS)
        names, where = " or ".join(self._labels[peer] for peer in peers), self._labels[self._rank]
        for peer in peers:
            if (failure := self._liveness.failure(peer)) is not None:
                return failure
        if "timed out" in words.lower() or "timeout" in words.lower():
            return PeerStalled(f"{names} stopped moving: {words}", rank=where)
        return PeerLost(f"the connection to {names} broke: {words}", rank=where)

    def flush(self, deadline: Deadline) -> None:
        if self._error is not None:
            raise self._error
        links = [*self._outgoing.values(), *self._incoming.values()]
        for link in links:
            self._reached(link, link.posted, deadline)
        for link in links:
            if link.error is not None:
                raise link.error

    def close(self, deadline: Deadline) -> None:
        if self._closed:
            return
        if self.failed:
            self.retire()
            return
        try:
            self.flush(deadline)
        except BaseException:
            self.retire()
            raise
        with self._lock:
            self._closed = True
            self._error = OrderError("the communicator is closed")
        self._liveness.close(LEFT)
        reaper.destroy(self._wire.groups)
        self._store = None

    def retire(self, keep: Iterable[object] = ()) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._error = self._error or OrderError("the communicator was retired")
            pending = [
                item for link in (*self._outgoing.values(), *self._incoming.values()) for item in link.pending
            ]
        self._liveness.close(GAVE_UP)
        reaper.park(
            self._wire.groups,
            works=[work for work, _, _ in pending],
            keep=[*keep, pending, self._store],
            abandon=self._wire.abandon,
        )

    @property
    def failed(self) -> bool:
        if self._closed or self._error is not None:
            return not isinstance(self._error, OrderError)
        return any(link.error is not None for link in (*self._outgoing.values(), *self._incoming.values()))


def _routes(ranks: range, senders: Sequence[int] | None) -> list[tuple[int, int]]:
    if senders is None:
        return [(sender, to) for sender in ranks for to in ranks if sender != to]
    if not senders or len(set(senders)) != len(senders) or not set(senders) <= set(ranks):
        raise ValueError(f"senders {list(senders)} are not distinct ranks of {len(ranks)}")
    return [(sender, to) for sender in senders for to in ranks if to not in senders]
