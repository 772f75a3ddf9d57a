"""Workers in Ray actors, driven as one server."""

from __future__ import annotations

import pytest

from core.tests.sharded_fleet import digests
from core.tests.sharded_models import Served, policy_tensors
from plugins.rdt.tests.worker_actors import (
    ask,
    ask_actors,
    crowd,
    hold,
    kill_worker,
    reached,
    refused_group,
    send,
    send_when_back,
    start,
    stop,
)
from weightwire.clients.protocol import ControlClient
from weightwire.errors import MessageError, OrderError, PeerFailed, PeerLost, TransferError
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank
from weightwire_rdt import RayWorkerGroup
from weightwire_rdt.worker_actor import function_named

# Ray starts a process for each actor, which imports torch: ten seconds on an idle machine, and many on one that is not.
STARTING = 110
pytestmark = pytest.mark.timeout(300)


def expected(seed: int) -> list[dict[str, str]]:
    models = [Served(rank, 2) for rank in range(2)]
    for model in models:
        model.load_weights(policy_tensors(seed).items())
    return [digests(model) for model in models]


def check_a_round_that_is_on(driver: Rank) -> None:
    """It holds up neither questions nor the operator, and can be ended."""
    driver.call(hold, True)
    sending = driver.start(send, 2, "step-2")
    driver.call(reached)
    info = driver.call(ask, "weight_info")
    assert (info["state"], info["update"], info["weight_version"]) == ("updating", "receiving", "step-1")
    assert [one["rank"] for one in info["ranks"]] == [0, 1]
    driver.call(ask, "pause", "keep", timeout=5)
    assert driver.call(ask, "weight_info")["gate"] == "paused(keep)"
    driver.call(ask, "resume")
    with pytest.raises(OrderError):
        driver.call(ask, "start_weight_update", update_id="another", timeout=5)
    assert driver.call(ask, "weight_info")["update"] == "receiving"
    driver.call(ask, "abort_weight_update", update_id=info["update_id"], timeout=10)
    driver.call(hold, False)
    with pytest.raises(TransferError, match="the update was aborted by abort_weight_update"):
        sending.result()
    assert driver.call(ask, "checksums") == expected(1)
    assert driver.call(send, 3, "step-3")["reinitialised"]
    assert driver.call(ask, "checksums") == expected(3)


def check_what_is_refused(driver: Rank) -> None:
    """It is told in the worker's words, or before anything is sent."""
    with pytest.raises(MessageError, match="lists 1 elements for 2 workers"):
        driver.call(ask, "update_weights", [{}])
    with pytest.raises(OrderError):
        driver.call(ask, "update_weights", {"round": 1}, timeout=5)
    driver.call(ask, "update_weight_version", "by hand")
    assert driver.call(ask, "weight_info")["weight_version"] == "by hand"
    driver.call(ask, "reset")
    assert driver.call(ask, "weight_info")["state"] == "torn"
    with pytest.raises(OrderError, match="torn") as torn:
        driver.call(ask, "resume")
    assert torn.value.rank in ("worker rank 0", "worker rank 1")
    driver.call(send, 4)
    assert driver.call(ask, "checksums") == expected(4)


def test_two_workers_from_start_to_end(ranks: BorrowRanks) -> None:
    (driver,) = ranks(1)
    driver.call(start, 2, timeout=STARTING)
    assert driver.call(ask, "get_world_size") == 2
    driver.call(send, 1, "step-1")
    assert driver.call(ask, "checksums") == expected(1)
    assert driver.call(ask_actors, "norm") == [16.0, 16.0]
    assert driver.call(ask_actors, "call", "open", [], {}, None)[0]["error"]["type"] == "Unsupported"
    check_a_round_that_is_on(driver)
    check_what_is_refused(driver)
    driver.call(kill_worker, 1)
    with pytest.raises(PeerLost, match="worker rank 1"):
        driver.call(send, 5)
    with pytest.raises(PeerLost, match="worker rank 1 is gone: .*died"):
        driver.call(ask, "get_world_size")
    driver.call(stop)


@pytest.mark.thorough
def test_an_actor_that_ray_makes_again(ranks: BorrowRanks) -> None:
    (driver,) = ranks(1)
    driver.call(start, 2, 1, timeout=STARTING)
    driver.call(send, 1, "step-1")
    driver.call(kill_worker, 1, True)
    assert driver.call(send_when_back, 2, "step-2", timeout=STARTING)["reinitialised"]
    assert driver.call(ask, "checksums") == expected(2)
    driver.call(stop)


def test_a_builder_that_is_not_there(ranks: BorrowRanks) -> None:
    (driver,) = ranks(1)
    with pytest.raises(PeerFailed, match=r"could not be made: .*MessageError: 'math:nothing'") as refused:
        driver.call(refused_group, "math:nothing")
    assert refused.value.rank == "worker rank 0"
    assert driver.call(crowd).startswith("Busy: the cluster had no room within 0.2 s for 2 ranks of {'CPU': 3}")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("math", "'module:function'"),
        (":sin", "'module:function'"),
        ("no_such_module:build", "no module 'no_such_module'"),
        ("math.sin:build", "no module 'math.sin'"),
        ("math:pi", "is no function"),
    ],
)
def test_references(reference: str, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        function_named(reference)


def test_it_is_a_control_client() -> None:
    assert isinstance(RayWorkerGroup([object()]), ControlClient)
    with pytest.raises(MessageError):
        RayWorkerGroup([])
    assert function_named("math:sin")(0.0) == 0.0
