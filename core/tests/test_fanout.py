"""Who takes part under a policy. What becomes of a transfer is tested with real servers, beside `weightwire push`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import nn

from weightwire.clients.fanout import FanoutClient
from weightwire.clients.local import LocalClient
from weightwire.errors import MessageError, NotInitialised, PeerLost, SourceMismatch, UpdateRefused
from weightwire.worker import Worker


class Server(LocalClient):
    """A worker of this process whose connection can be cut."""

    def __init__(self) -> None:
        super().__init__(Worker(nn.Linear(1, 1)))
        self.reachable = True
        self.linked_at: int | None = None

    def get_world_size(self, include_dp: bool = True) -> int:
        if not self.reachable:
            raise PeerLost("the connection was refused")
        return 1

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
        self.linked_at = init_info["rank_offset"]

    def start_weight_update(
        self, *, update_id: str | None = None, draft: bool = False, timeout: float | None = None
    ) -> None:
        pass


class Round:
    """Links as a trainer would and fails with `errors`, one for each attempt."""

    def __init__(self, client: FanoutClient, *errors: Exception) -> None:
        self._client = client
        self._errors = list(errors)
        self.attempts = 0

    def __call__(self) -> int:
        self.attempts += 1
        workers = self._client.get_world_size()
        self._client.init_weight_transfer_engine({"rank_offset": 1})
        if self._errors:
            raise self._errors.pop(0)
        return workers


def fleet(policy: Any, count: int = 3) -> tuple[FanoutClient, list[Server]]:
    servers = [Server() for _ in range(count)]
    return FanoutClient(servers, policy), servers


def test_no_such_policy() -> None:
    with pytest.raises(MessageError, match="policy must be one of all, quorum, best_effort, got 'most'"):
        fleet("most")


@pytest.mark.parametrize(
    "error",
    [
        PeerLost("worker rank 1 (pid 7) was lost during transfer-0"),
        UpdateRefused("the model has no parameter 'a'", rank="worker rank 1"),
    ],
)
def test_the_server_that_an_error_names_is_left_out(error: Exception) -> None:
    client, servers = fleet("quorum")
    attempt = Round(client, error)
    assert client.persist(attempt) == 2
    assert attempt.attempts == 2
    assert (servers[0].linked_at, servers[2].linked_at) == (1, 2)
    outcomes = client.outcomes()
    assert [tuple(one.workers) for one in outcomes] == [(0,), (), (1,)]
    assert outcomes[1].error == str(error)
    assert client.persist(Round(client)) == 3


def test_a_server_that_does_not_answer_is_left_out_and_comes_back() -> None:
    client, servers = fleet("quorum")
    servers[0].reachable = False
    assert client.persist(Round(client)) == 2
    assert client.outcomes()[0].error == "the connection was refused"
    client.start_weight_update()
    servers[0].reachable = True
    with pytest.raises(NotInitialised, match="server 1 of 3 came back"):
        client.start_weight_update()
    assert client.persist(Round(client)) == 3
    assert all(one.committed for one in client.outcomes())


@pytest.mark.parametrize(("policy", "least"), [("quorum", 3), ("best_effort", 1)])
def test_too_few(policy: str, least: int) -> None:
    client, servers = fleet(policy, 4)
    for server in servers[least:]:
        server.reachable = False
    assert client.get_world_size() == least
    servers[least - 1].reachable = False
    with pytest.raises(PeerLost, match=rf"policy '{policy}' is not met: {least - 1} of 4 servers are left"):
        client.get_world_size()


def test_losing_one_too_many_meanwhile() -> None:
    client, servers = fleet("quorum")
    servers[0].reachable = False
    lost = PeerLost("worker rank 0 (pid 7) was lost")
    with pytest.raises(PeerLost, match=r"1 of 3 servers are left .*server 2 of 3: worker rank 0 \(pid 7\)") as raised:
        client.persist(Round(client, lost))
    assert raised.value.__cause__ is lost


def test_what_is_no_servers_failure_is_raised() -> None:
    client, _ = fleet("best_effort")
    attempt = Round(client, SourceMismatch("the source yields 'b' at index 0"))
    with pytest.raises(SourceMismatch):
        client.persist(attempt)
    assert attempt.attempts == 1


def test_policy_all_tries_once() -> None:
    client, _ = fleet("all")
    attempt = Round(client, PeerLost("worker rank 1 was lost"))
    with pytest.raises(PeerLost, match="worker rank 1"):
        client.persist(attempt)
    assert attempt.attempts == 1


def test_a_call_that_hangs_keeps_nobody() -> None:
    client, servers = fleet("all")
    over = threading.Event()

    def hang(**_: Any) -> None:
        over.wait(30)

    def fail(**_: Any) -> None:
        raise PeerLost("gone")

    servers[0].start_weight_update, servers[1].start_weight_update = hang, fail  # type: ignore[method-assign]
    with pytest.raises(PeerLost, match="gone"):
        client.start_weight_update()
    over.set()


def test_a_start_does_not_meet_the_end_of_what_failed_elsewhere() -> None:
    """One server refuses at once; the other still works on it when the caller tries again."""
    ended, order = threading.Event(), []

    class Refusing(Server):
        def finish_weight_update(self, weight_version: str | None = None, **options: Any) -> None:
            raise UpdateRefused("not these")

    class Slow(Server):
        def finish_weight_update(self, weight_version: str | None = None, **options: Any) -> None:
            ended.wait(10)
            order.append("finish")

        def start_weight_update(self, **options: Any) -> None:
            order.append("start")

    client = FanoutClient([Refusing(), Slow()])
    client.init_weight_transfer_engine({"rank_offset": 1})
    with pytest.raises(UpdateRefused):
        client.finish_weight_update()
    threading.Timer(0.2, ended.set).start()
    client.start_weight_update()
    assert order == ["finish", "start"]
