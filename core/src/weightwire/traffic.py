"""The parcels a communicator has under way, and the one way in which they are waited for.

Every wait ends when the parcel has moved, when the deadline passes or is cancelled, when the peer's connection
closes, or when nothing has moved for the stall limit.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightwire import faults
from weightwire.deadline import Deadline
from weightwire.errors import PeerFailed, PeerLost, PeerStalled, TransferError, WeightwireError
from weightwire.liveness import Liveness

_SLICE = 0.02
_NEWS_MILLISECONDS = 200
_DRAIN_SECONDS = 0.3


@dataclass(slots=True, eq=False)
class Parcel:
    """Bytes that a wire started to move as one.

    Attributes:
        works: Operations that have to end before all of it has moved; taken out as they do.
        nbytes: How many bytes.
        keep: Whatever must live until then.
    """

    works: deque[Any]
    nbytes: int
    keep: list[object]


@dataclass(slots=True, eq=False)
class Flow:
    """What goes to one peer or comes from it. Parcels are counted from 1 and end in order.

    Attributes:
        peers: Its rank; all receivers' ranks where one operation serves them all.
        patience: Seconds without a parcel, while one is waited for, after which a peer is said to have stopped.
        pending: What is under way.
        pending_bytes: Bytes of those parcels.
        posted: Number of the last parcel started.
        moved: Number of the last parcel that moved.
        moved_at: When that was; when the flow was last started, if it was idle.
        lost_at: When a peer was seen to be gone.
        error: Why nothing more will move.
    """

    peers: tuple[int, ...]
    patience: float
    pending: deque[Parcel] = field(default_factory=deque)
    pending_bytes: int = 0
    posted: int = 0
    moved: int = 0
    moved_at: float = 0.0
    lost_at: float = 0.0
    error: TransferError | None = None

    def check(self) -> None:
        """Raise `error`, if there is one."""
        if self.error is not None:
            raise _fresh(self.error)


class Traffic:
    """All flows of one communicator.

    Args:
        flows: Them.
        liveness: Tells who is alive.
        settled: Waits up to some seconds for an operation to end; returns whether it has.
        labels: Every rank in words.
        rank: This process.
    """

    def __init__(
        self,
        flows: Sequence[Flow],
        liveness: Liveness,
        settled: Callable[[Any, float], bool],
        *,
        labels: Sequence[str],
        rank: int,
    ) -> None:
        self.flows = flows
        self.error: WeightwireError | None = None
        self.lock = threading.RLock()
        self.round_is_new = False
        self._liveness = liveness
        self._settled = settled
        self._labels = labels
        self._where = labels[rank]

    def check(self) -> None:
        """Raise what ended all traffic, if something did."""
        if self.error is not None:
            raise _fresh(self.error)

    def post(self, flow: Flow, parcel: Parcel) -> None:
        """Take a parcel that was just started; called under `lock`."""
        if not flow.pending:
            flow.moved_at = time.monotonic()
        flow.pending.append(parcel)
        flow.pending_bytes += parcel.nbytes
        flow.posted += 1

    def advance(self, flow: Flow) -> int:
        """Take note of what has moved; returns the number of the last parcel."""
        first = False
        with self.lock:
            while flow.error is None and flow.pending:
                parcel = flow.pending[0]
                try:
                    while parcel.works and parcel.works[0].is_completed():
                        parcel.works[0].wait()
                        parcel.works.popleft()
                except RuntimeError as error:
                    flow.error = explain(self._liveness, flow.peers, error, labels=self._labels, where=self._where)
                    break
                if parcel.works:
                    break
                flow.pending_bytes -= flow.pending.popleft().nbytes
                flow.moved += 1
                flow.moved_at = time.monotonic()
                first, self.round_is_new = first or self.round_is_new, False
        if first:
            faults.reach("communicator.first_piece")
        return flow.moved

    def reached(self, flow: Flow, mark: int, deadline: Deadline) -> bool:
        """Wait until parcel `mark` has moved; False if the peer failed first.

        Raises:
            DeadlineExceeded: The deadline passed.
            BaseException: Whatever the deadline was cancelled with, or what ended the traffic before.
        """
        began = time.monotonic()
        try:
            while self.advance(flow) < mark:
                if flow.error is not None:
                    return False
                self.check()
                self._check_deadline(flow, deadline)
                with self.lock:
                    oldest = flow.pending[0].works[0] if flow.pending and flow.pending[0].works else None
                if oldest is not None and not self._settled(oldest, _SLICE):
                    self._watch(flow, began)
        except BaseException as error:
            self._note(error)
            raise
        return True

    def has_room(self, flow: Flow, *, nbytes: int, parcels: int, deadline: Deadline) -> bool:
        """Wait until fewer bytes and parcels than these are under way; False if the peer failed first.

        Raises:
            BaseException: As `reached`.
        """
        try:
            self._check_deadline(flow, deadline)
        except BaseException as error:
            self._note(error)
            raise
        while flow.pending_bytes >= nbytes or len(flow.pending) >= parcels:
            if not self.reached(flow, flow.moved + 1, deadline):
                return False
        self.advance(flow)
        return flow.error is None

    def _watch(self, flow: Flow, began: float) -> None:
        self._liveness.poll()
        now = time.monotonic()
        idle = now - max(flow.moved_at, began)
        if (failure := next(filter(None, map(self._liveness.failure, flow.peers)), None)) is not None:
            flow.lost_at = flow.lost_at or now
            # What a peer handed to its kernel before it left still arrives.
            if isinstance(failure, PeerFailed) or now - max(flow.lost_at, flow.moved_at) > _DRAIN_SECONDS:
                flow.error = failure
        elif idle > flow.patience:
            words = f"{self._names(flow)} is there and has not moved a byte for {idle:.1f} s"
            flow.error = PeerStalled(words, rank=self._where)

    def _check_deadline(self, flow: Flow, deadline: Deadline) -> None:
        deadline.check(f"the transfer with {self._names(flow)}")

    def _note(self, error: BaseException) -> None:
        words = f"an earlier transfer failed, {type(error).__name__}: {error}"
        self.error = self.error or TransferError(words, rank=self._where)

    def _names(self, flow: Flow) -> str:
        return " or ".join(self._labels[peer] for peer in flow.peers)

    def stop(self, error: WeightwireError) -> list[Parcel]:
        """End all waits with `error`, unless something ended them before; returns what is under way."""
        with self.lock:
            self.error = self.error or error
            pending = [item for flow in self.flows for item in flow.pending]
            for flow in self.flows:
                flow.pending.clear()
        return pending


def explain(
    liveness: Liveness, peers: Sequence[int], error: RuntimeError, *, labels: Sequence[str], where: str
) -> TransferError:
    """Say who made an operation with `peers` fail: the connection that broke tells, a little later than gloo."""
    liveness.poll(_NEWS_MILLISECONDS)
    names = " or ".join(labels[peer] for peer in peers)
    if (failure := next(filter(None, map(liveness.failure, peers)), None)) is not None:
        return failure
    stalled = any(word in str(error).lower() for word in ("timed out", "timeout"))
    kind, what = (PeerStalled, "stopped") if stalled else (PeerLost, "broke")
    return kind(f"the transfer with {names} {what}: {error}", rank=where)


def _fresh(error: WeightwireError) -> WeightwireError:
    # What is kept is never raised itself: its traceback would hold on to buffers.
    return copy.copy(error)
