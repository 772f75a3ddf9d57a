from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from weightwire.deadline import Deadline
from weightwire.errors import OrderError, PeerFailed, PeerLost, TransferError
from weightwire.traffic import Flow, Parcel, Traffic


class Work:
    """An operation that ends after some slices of waiting, well or not."""

    def __init__(self, slices: int, error: RuntimeError | None = None) -> None:
        self.slices = slices
        self.error = error

    def is_completed(self) -> bool:
        return self.slices <= 0

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


class Peers:
    """A `Liveness` that has heard what it is told."""

    def __init__(self, failure: TransferError | None = None) -> None:
        self._failure = failure

    def poll(self, milliseconds: int = 0) -> None:
        pass

    def failure(self, peer: int) -> TransferError | None:
        return self._failure


def traffic_with(work: Work, peers: Peers | None = None) -> tuple[Traffic, Flow]:
    def settled(work: Any, seconds: float) -> bool:
        work.slices -= 1
        return bool(work.is_completed())

    flow = Flow((1,), 5.0)
    liveness: Any = peers or Peers()
    traffic = Traffic([flow], liveness, settled, labels=["here", "there"], rank=0)
    with traffic.lock:
        traffic.post(flow, Parcel(deque([work]), 1, []))
    return traffic, flow


def test_what_a_peer_sent_before_it_left_still_counts() -> None:
    traffic, flow = traffic_with(Work(3), Peers(PeerLost("there closed its communicator")))
    assert traffic.reached(flow, 1, Deadline(5))
    assert flow.error is None


def test_a_peer_that_gave_up_is_believed_at_once() -> None:
    traffic, flow = traffic_with(Work(3), Peers(PeerFailed("there gave up the transfer")))
    assert not traffic.reached(flow, 1, Deadline(5))
    with pytest.raises(PeerFailed):
        flow.check()


def test_an_operation_that_fails_names_the_peer_and_keeps_the_words() -> None:
    traffic, flow = traffic_with(Work(1, RuntimeError("Connection reset by peer")))
    assert not traffic.reached(flow, 1, Deadline(5))
    with pytest.raises(PeerLost, match="the transfer with there broke: Connection reset by peer"):
        flow.check()


def test_stopping_ends_every_wait() -> None:
    traffic, flow = traffic_with(Work(10**9))
    assert len(traffic.stop(OrderError("closed"))) == 1
    with pytest.raises(OrderError, match="closed"):
        traffic.reached(flow, 1, Deadline(5))


def test_errors_do_not_hold_on_to_what_was_under_way() -> None:
    traffic, flow = traffic_with(Work(1, RuntimeError("broken")))
    traffic.reached(flow, 1, Deadline(5))
    with pytest.raises(PeerLost):
        flow.check()
    assert flow.error is not None
    assert flow.error.__traceback__ is None
    assert flow.error.__cause__ is None
