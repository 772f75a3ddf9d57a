"""vLLM's client for Ray actors, against actors with vLLM's methods."""

from __future__ import annotations

import time

import pytest

from plugins.rdt.tests.reference_actor import drive_silent, let_go, no_handle, push, start, update
from weightwire.clients.protocol import ControlClient, VLLMWeightSyncClient
from weightwire.errors import DeadlineExceeded, OrderError, PeerFailed, PeerLost, Unsupported, UpdateRefused
from weightwire.testing.fixtures import BorrowRanks
from weightwire_rdt import RayVLLMWeightSyncClient


def test_it_is_a_client() -> None:
    client = RayVLLMWeightSyncClient(object())
    assert isinstance(client, VLLMWeightSyncClient)
    assert not isinstance(client, ControlClient)


def test_calls_and_failures(ranks: BorrowRanks) -> None:
    (driver,) = ranks(1)
    driver.call(no_handle)
    driver.call(start, 2)
    count, (first, second) = driver.call(push, "step-1", [{"a": 1}, {"a": 2}])
    assert count == 3
    assert first == second
    assert first == [
        ["init", "WeightTransferInitRequest", {"master_port": 1}],
        ["start"],
        ["update", "WeightTransferUpdateRequest", [{"a": 1}, {"a": 2}]],
        ["finish"],
        ["version", "step-1"],
    ]
    _, (first, second) = driver.call(push, None, {"a": 3})
    assert first[5:] == [*first[:2], ["update", "WeightTransferUpdateRequest", {"a": 3}], ["finish"]]

    with pytest.raises(UpdateRefused, match="no such parameter") as refused:
        driver.call(update, "refuse")
    assert refused.value.parameter == "lm_head.weight"
    assert "Actor(Engine" in str(refused.value)
    with pytest.raises(OrderError, match="start_weight_update comes first"):
        driver.call(update, "pass on")
    with pytest.raises(PeerFailed, match="RuntimeError: a line,\nand another"):
        driver.call(update, "break")
    with pytest.raises(DeadlineExceeded, match=r"update_weights was not answered within 0.5 s by Actor\(Engine"):
        driver.call(update, "hang", 0.5)
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"Actor\(Engine.* is gone: .*died"):
        driver.call(update, "die")
    assert time.monotonic() - began < 15
    with pytest.raises(PeerLost, match=r"Actor\(Engine.* is gone"):
        driver.call(update, "refuse")
    driver.call(let_go)


def test_an_actor_without_the_methods(ranks: BorrowRanks) -> None:
    (driver,) = ranks(1)
    with pytest.raises(Unsupported, match=r"Actor\(Silent.* has no method start_weight_update"):
        driver.call(drive_silent)
