"""A second server beside the first, which stages nothing: both as one, and what updates that write in place cost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests.conftest import Connect, Models
from plugins.vllm.tests.scene import Server, open_trainer, send
from weightwire import FanoutClient
from weightwire.errors import WeightwireError
from weightwire.testing.fixtures import BorrowRanks

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("server")]


@pytest.fixture(scope="module")
def in_place(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose updates go straight into the live model."""
    options = json.dumps({"weightwire": {"staging": "none"}})
    log = tmp_path_factory.mktemp("logs") / "in_place.log"
    server = Server(models.old.folder, log, "--additional-config", options)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_both_as_one(server: Server, in_place: Server, models: Models, connect: Connect, backend: str) -> None:
    trainer = connect(FanoutClient([server.client, in_place.client]), models.new.module, backend, takeover=True)
    report = trainer.send_weights(weight_version="both", pause="keep")
    assert [one.rank for one in report.ranks] == ["trainer rank 0", "worker rank 0", "worker rank 1"]
    for one in (server, in_place):
        assert one.greedy() == models.new.greedy()
        assert one.label() == "both"
        assert one.workers()[0]["revision"] == report.revision


def test_one_that_is_asleep_keeps_both_on_their_weights(
    server: Server, in_place: Server, models: Models, connect: Connect
) -> None:
    trainer = connect(FanoutClient([server.client, in_place.client]), models.old.module, takeover=True)
    trainer.send_weights(weight_version="old")
    trainer.shutdown()
    trainer = connect(FanoutClient([server.client, in_place.client]), models.new.module)
    in_place.post("/sleep", level="1").raise_for_status()
    try:
        with pytest.raises(WeightwireError, match="asleep"):
            trainer.send_weights(weight_version="refused", pause="wait")
    finally:
        in_place.post("/wake_up").raise_for_status()
    for one in (server, in_place):
        assert one.greedy() == models.old.greedy()
        assert one.label() == "old"
        assert not one.paused()


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_torn_weights_are_refused_until_a_full_update(
    ranks: BorrowRanks, in_place: Server, models: Models, connect: Connect, backend: str
) -> None:
    connect(in_place.client, models.old.module, takeover=True).send_weights(weight_version="old")
    (trainer,) = ranks(1)
    trainer.call(open_trainer, in_place.url, models.new.weights, backend, takeover=True)
    trainer.at("trainer.sent", "kill")
    trainer.start(send, "lost", pause="keep")
    trainer.reached("trainer.sent")
    # Until it notices, the update that is open refuses.
    assert in_place.complete().status_code == 500
    until = time.monotonic() + 30
    while in_place.workers()[0]["update"] != "none":
        assert time.monotonic() < until, in_place.workers()
        time.sleep(0.05)
    assert in_place.complete().status_code == 500
    assert in_place.workers()[0]["weights"] == "torn"
    assert in_place.label() == "old"
    assert "WeightsTorn" in in_place.post("/resume").text
    connect(in_place.client, models.new.module, backend, takeover=True).send_weights(weight_version="whole")
    assert in_place.greedy() == models.new.greedy()
    assert in_place.label() == "whole"
    assert not in_place.paused()


def test_what_does_not_fit_leaves_an_in_place_server_whole(in_place: Server, models: Models, connect: Connect) -> None:
    connect(in_place.client, models.old.module, takeover=True).send_weights(weight_version="old")
    other = models.new.module.model  # every name lacks "model."
    with pytest.raises(WeightwireError, match="embed_tokens"):
        connect(in_place.client, other, takeover=True).send_weights(weight_version="refused")
    assert in_place.greedy() == models.old.greedy()
    assert not in_place.paused()
