"""Epochs that go on without some of their members, and clients that do."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from core.tests.epochs import LIMIT, Epoch, error_of
from weightwire.clients.fanout import FanoutClient
from weightwire.errors import MessageError, PeerFailed, PeerLost, TransferAborted, TransferError, WeightwireError

GROUPS = [[1, 2], [3, 4]]


def pairs(least: int = 1) -> Epoch:
    """One trainer rank and two groups of two workers."""
    epoch = Epoch(workers=4)
    epoch.members[0].parting.allow(GROUPS, least=least)
    return epoch


def test_an_exchange_under_way_is_answered_without_a_group_that_failed() -> None:
    with pairs() as epoch:
        heard: list[Any] = []
        epoch.members[0].parting.on_parted = lambda ranks, error: heard.append((list(ranks), str(error)))
        waiting = [epoch.exchange(rank, "vote", payload=rank, gather=True) for rank in (0, 2, 3, 4)]
        epoch.members[1].fail(TransferError("out of memory"))
        for future in (waiting[0], *waiting[2:]):
            outcome = future.result(LIMIT)
            assert outcome.unanimous
            assert outcome.payloads == {0: 0, 3: 3, 4: 4}
        assert "out of memory" in str(error_of(waiting[1]))
        assert isinstance(error_of(waiting[1]), PeerFailed)
        for rank in (0, 3, 4):
            assert epoch.members[rank].failure is None
            assert list(epoch.members[rank].parting.parted) == [1, 2]
        assert heard == [([1, 2], "[worker rank 0] out of memory")]
        later = [epoch.exchange(rank, "later") for rank in (0, 3, 4)]
        assert all(future.result(LIMIT).unanimous for future in later)


def test_an_error_that_a_group_posted_goes_with_it() -> None:
    with pairs() as epoch:
        refused = epoch.exchange(1, "vote", error=TransferError("no"))
        waiting = [epoch.exchange(rank, "vote") for rank in (0, 3, 4)]
        epoch.members[2].close()
        assert all(future.result(LIMIT).unanimous for future in waiting)
        assert isinstance(error_of(refused), PeerLost)


def test_the_last_group_takes_the_epoch_with_it() -> None:
    with pairs() as epoch:
        assert epoch.members[0].parting.part(3, TransferAborted("not needed"))
        assert isinstance(error_of(epoch.exchange(4, "vote")), TransferAborted)
        waiting = epoch.exchange(0, "vote")
        assert not epoch.members[0].parting.part(1, TransferAborted("not needed"))
        epoch.members[2].fail(TransferError("out of memory"))
        assert "out of memory" in str(error_of(waiting))


def test_as_many_groups_as_have_to_stay_do() -> None:
    with pairs(least=2) as epoch:
        waiting = epoch.exchange(0, "vote")
        epoch.members[1].fail(TransferError("out of memory"))
        assert "out of memory" in str(error_of(waiting))


def test_a_trainer_rank_never_parts() -> None:
    with Epoch(trainers=2, workers=2) as epoch:
        epoch.members[0].parting.allow([[2], [3]], least=1)
        waiting = epoch.exchange(3, "vote")
        epoch.members[1].fail(TransferError("out of memory"))
        assert "out of memory" in str(error_of(waiting))


def test_only_chosen_groups_stay() -> None:
    with pairs() as epoch:
        parting, error = epoch.members[0].parting, TransferAborted("left out")
        with pytest.raises(MessageError, match=r"one server has the member ranks \[1, 2\]"):
            parting.part_from_others([1, 3, 4], error)
        assert not parting.parted
        parting.part_from_others([3, 4], error)
        assert list(parting.parted) == [1, 2]
        with pytest.raises(MessageError, match=r"member ranks \[3, 4\] cannot be left out"):
            parting.part_from_others([1, 2], error)
    with Epoch(workers=1) as epoch, pytest.raises(MessageError, match="FanoutClient"):
        epoch.members[0].parting.part_from_others([1], error)


# The client


class Held:
    """A server of two workers whose calls end when they are told to."""

    def __init__(self) -> None:
        self.error: WeightwireError | None = None
        self.called = threading.Event()
        self.go_on = threading.Event()
        self.calls: list[str] = []

    def get_world_size(self, include_dp: bool = True) -> int:
        return 2

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
        self.calls.append("init")

    def finish_weight_update(
        self, weight_version: str | None = None, *, update_id: str | None = None, timeout: float | None = None
    ) -> None:
        self.called.set()
        assert self.go_on.wait(LIMIT)
        if self.error is not None:
            raise self.error
        self.calls.append("finish")


def linked(servers: Sequence[Any], policy: Any = "best_effort") -> FanoutClient:
    client = FanoutClient(servers, policy)
    client.init_weight_transfer_engine({})
    return client


def finish(client: FanoutClient) -> tuple[threading.Thread, list[BaseException | None]]:
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            client.finish_weight_update()
            ended.append(None)
        except WeightwireError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def test_a_server_that_the_ranks_go_on_without_is_not_waited_for() -> None:
    stays, hangs = Held(), Held()
    client = linked([stays, hangs])
    assert client.let_servers_go(lambda worker, error: False) == ([range(2), range(2, 4)], 1)
    thread, ended = finish(client)
    assert hangs.called.wait(LIMIT)
    client.leave_out([3], PeerLost("worker rank 3 is stopped"))
    stays.go_on.set()
    thread.join(LIMIT)
    assert ended == [None]
    outcomes = client.outcomes()
    assert [outcome.committed for outcome in outcomes] == [True, False]
    assert outcomes[1].error == "worker rank 3 is stopped"
    thread, ended = finish(client)  # the next call is not for it
    thread.join(LIMIT)
    assert ended == [None]
    assert hangs.calls == ["init"]
    hangs.go_on.set()


@pytest.mark.parametrize("allowed", [True, False])
def test_a_server_whose_call_fails_first_is_asked_about(allowed: bool) -> None:
    stays, dies = Held(), Held()
    dies.error = PeerLost("connection refused")
    client = linked([stays, dies])
    asked: list[tuple[int, str]] = []

    def lost(worker: int, error: WeightwireError) -> bool:
        asked.append((worker, str(error)))
        if allowed:
            client.leave_out([2, 3], error)
        return allowed

    client.let_servers_go(lost)
    stays.go_on.set()
    dies.go_on.set()
    thread, ended = finish(client)
    thread.join(LIMIT)
    assert asked == [(2, "connection refused")]
    assert ended == ([None] if allowed else [dies.error])
    assert stays.calls == ["init", "finish"]


def test_a_server_that_refuses_is_refused_for_all() -> None:
    stays, refuses = Held(), Held()
    refuses.error = MessageError("no such label")
    client = linked([stays, refuses])
    client.let_servers_go(lambda worker, error: pytest.fail("it is there"))
    stays.go_on.set()
    refuses.go_on.set()
    thread, ended = finish(client)
    thread.join(LIMIT)
    assert ended == [refuses.error]


def test_how_many_servers_have_to_stay() -> None:
    servers = [Held() for _ in range(4)]
    assert linked(servers, "quorum").let_servers_go(lambda worker, error: False) == (
        [range(2), range(2, 4), range(4, 6), range(6, 8)],
        3,
    )
    assert linked(servers, "all").let_servers_go(lambda worker, error: False) is None
