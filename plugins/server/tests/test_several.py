"""Several ranks behind one front: all of them or none, whichever of them fails, and when."""

from __future__ import annotations

from contextvars import Context
from typing import Any

import pytest

from plugins.server.tests.fleet import RANKS, FleetScene
from plugins.server.tests.scene import small_model, until
from weightwire.clients.http import HTTPVLLMWeightSyncClient
from weightwire.deadline import Deadline
from weightwire.errors import Busy, DeadlineExceeded, HandshakeError, WeightsTorn, WeightwireError
from weightwire.gate import Hold
from weightwire.messages import ParallelConfig
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource
from weightwire.worker import Worker
from weightwire_nccl import NCCLTrainerInitInfo
from weightwire_server.lifeline import Lifeline


def elements(fleet: FleetScene, **second: Any) -> dict[str, Any]:
    """An update with one element per rank; the second rank's differs."""
    return {"update_info": [fleet.update_info(value=5.0), fleet.update_info(value=5.0, **second)]}


def info(fleet: FleetScene) -> dict[str, Any]:
    known: dict[str, Any] = fleet.get("/weight_info").json()
    return known


def values(fleet: FleetScene) -> list[float]:
    return [float(next(worker._main.model.parameters()).detach().flatten()[0]) for worker in fleet.workers]


def enter(hold: Hold) -> None:
    """Hold the weights as somebody else than this test, which may hold them already."""
    Context().run(hold.__enter__)


def test_what_a_server_of_several_ranks_says(fleet: FleetScene) -> None:
    assert fleet.get("/get_world_size").json() == {"world_size": RANKS}
    first = info(fleet)
    assert (first["state"], first["rank"], [one["rank"] for one in first["ranks"]]) == ("uninitialised", None, [0, 1])
    fleet.init()
    fleet.push(2.0, label="two")
    after = info(fleet)
    assert (after["state"], after["weight_version"], after["reason"]) == ("ready", "two", None)
    assert after["revision"] != first["revision"]
    sums = fleet.post("/weight_checker", {"action": "checksum"}).json()["checksums"]
    assert [key.partition(":0.bias")[0] for key in sums if key.endswith("0.bias")] == [
        f"dp0:pp0:pcp0:tp{rank}" for rank in range(RANKS)
    ]
    assert fleet.post("/weight_checker", {"action": "compare", "baseline": sums}).json()["match"]
    assert fleet.post("/update_weight_version", {"new_version": "zwei"}).status_code == 200
    assert info(fleet)["weight_version"] == "zwei"


def test_each_rank_gets_its_element(fleet: FleetScene) -> None:
    fleet.enter("open")
    assert fleet.post("/update_weights", {"update_info": [fleet.update_info()]}).status_code == 400
    assert fleet.post("/update_weights", elements(fleet) | {}).status_code == 200
    assert fleet.finish("u1").status_code == 200
    fleet.start("u2")
    body = {"update_info": [fleet.update_info(value=1.0), fleet.update_info(value=2.0)]}
    assert fleet.post("/update_weights", body).status_code == 200
    assert fleet.finish("u2").status_code == 200
    assert values(fleet) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("second", "status", "words"),
    [({"fail": "it burns"}, 500, "it burns"), ({"colour": "red"}, 400, "unknown key 'colour'")],
)
def test_an_update_that_fails_on_one_rank_is_dropped_on_all(
    fleet: FleetScene, second: dict[str, Any], status: int, words: str
) -> None:
    fleet.enter("open")
    answer = fleet.post("/update_weights", elements(fleet, **second), update="u1", sequence=0)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["rank"] == "rank 1"
    assert all(worker.session.idle for worker in fleet.workers)
    assert fleet.value() == 0.0
    fleet.check_recovers()


def test_an_update_that_fails_on_one_rank_ends_one_that_hangs_on_another(fleet: FleetScene) -> None:
    fleet.enter("open")
    body = {"update_info": [fleet.update_info(hold=True), fleet.update_info(fail="it burns")]}
    answer = fleet.post("/update_weights", body, update="u1", sequence=0)
    assert "it burns" in answer.json()["error"]["message"]
    assert all(worker.session.idle for worker in fleet.workers)
    fleet.check_recovers()


def test_ranks_without_a_vote_of_their_trainer_vote_at_the_front(fleet: FleetScene) -> None:
    fleet.enter("open")
    assert fleet.post("/update_weights", elements(fleet, skip="1.bias"), update="u1", sequence=0).status_code == 200
    answer = fleet.finish("u1", "half")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "1.bias")
    assert fleet.value() == 0.0
    assert info(fleet)["weights"] == "whole"
    fleet.check_recovers()


def test_the_front_s_readers_hold_up_every_rank(fleet: FleetScene) -> None:
    fleet.enter("committing")
    assert fleet.value() == 0.0
    with pytest.raises(DeadlineExceeded):
        enter(fleet.front.gate.reading(deadline=Deadline(0.05)))
    fleet.release()
    with fleet.front.reading():
        assert fleet.value() == 1.0


def test_readers_that_outlast_finish_keep_their_weights(fleet: FleetScene) -> None:
    fleet.enter("open")
    fleet.update("u1", 0)
    fleet.read()
    answer = fleet.finish("u1", headers={"Weightwire-Timeout": "0.5"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "Busy")
    assert "readers" in answer.json()["error"]["message"]
    assert fleet.value() == 0.0
    fleet.check_recovers()


def test_in_place_updates_keep_the_front_s_readers_out(fleet: FleetScene) -> None:
    fleet.use(staging="in_place")
    fleet.enter("receiving")
    until(lambda: fleet.get("/health").status_code == 503)
    fleet.release()
    assert fleet.finish("u1").status_code == 200
    until(lambda: fleet.get("/health").status_code == 200)
    fleet.start("u2")
    assert fleet.post("/update_weights", elements(fleet, fail="half-way"), update="u2").status_code == 500
    until(lambda: fleet.get("/health").status_code == 503)
    assert info(fleet)["weights"] == "torn"
    with pytest.raises(WeightsTorn):
        fleet.front.reading().__enter__()
    fleet.check_recovers()


@pytest.mark.parametrize("state", ["uninitialised", "open", "receiving", "committing"])
def test_a_rank_that_is_gone(fleet: FleetScene, state: str) -> None:
    fleet.enter(state)
    fleet.part(1)
    for answer in (fleet.get("/health"), fleet.init(), fleet.start("u9"), fleet.update("u1", 0)):
        assert answer.status_code == 503
        assert "rank 1 (pid " in answer.json()["error"]["message"]
    with pytest.raises(Busy, match="rank 1"):
        enter(fleet.front.reading())
    known = info(fleet)
    assert (known["state"], known["ranks"][1]["state"]) == ("lost", "lost")
    if state != "committing":  # which goes on by itself
        until(lambda: fleet.workers[0].session.idle)
    fleet.release()
    until(lambda: fleet.workers[0].session.idle)
    fleet.join(1, fleet.new_worker(1))
    fleet.check_recovers()


def test_a_rank_that_was_replaced_makes_the_weights_torn_until_a_full_update(fleet: FleetScene) -> None:
    fleet.init()
    fleet.part(1)
    fleet.join(1, fleet.new_worker(1))
    assert fleet.get("/health").status_code == 200  # nothing was ever committed: all hold what their factory made
    fleet.init()
    fleet.push(3.0)
    fleet.part(1)
    fleet.join(1, fleet.new_worker(1))
    assert values(fleet) == [3.0, 0.0]
    assert info(fleet)["state"] == "torn"
    answer = fleet.get("/health")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "WeightsTorn")
    assert "rank 1 was replaced" in answer.json()["error"]["message"]
    assert fleet.post("/resume").status_code == 409
    assert fleet.post("/weight_checker", {"action": "checksum"}).status_code == 409
    fleet.init()
    fleet.start("p")
    assert fleet.post("/update_weights", {"update_info": fleet.update_info(scope="partial")}).status_code == 400
    fleet.check_recovers()


def test_a_reset_waits_for_the_front_s_readers_and_harms_nothing_where_it_is_refused(fleet: FleetScene) -> None:
    fleet.enter("open")
    reset = {"action": "reset"}
    assert fleet.post("/weight_checker", reset).status_code == 409
    assert info(fleet)["weights"] == "whole"
    assert fleet.update("u1", 0).status_code == 200
    assert fleet.finish("u1").status_code == 200
    fleet.read()
    waiting = fleet.waiting(lambda: fleet.post("/weight_checker", reset))
    assert fleet.value() == 1.0
    fleet.release()
    assert waiting.result().status_code == 200
    with pytest.raises(WeightsTorn):
        fleet.front.reading().__enter__()
    assert fleet.value() == 0.0
    fleet.check_recovers()


def test_a_commit_that_only_some_ranks_made_leaves_the_server_torn(
    fleet: FleetScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies() -> None:
        raise RuntimeError("out of memory in the middle of a commit")

    fleet.enter("open")
    fleet.update("u1", 0, value=4.0)
    with monkeypatch.context() as broken:
        broken.setattr(fleet.workers[1]._main.sink, "commit", dies)
        answer = fleet.finish("u1", "four")
    assert answer.status_code == 500
    assert (values(fleet), info(fleet)["weights"], info(fleet)["weight_version"]) == ([4.0, 0.0], "torn", "mixed")
    assert "some ranks have committed and some have not" in fleet.get("/health").json()["error"]["message"]
    fleet.check_recovers()


def test_the_front_takes_its_own_ranks_alone(fleet: FleetScene) -> None:
    directory = fleet._directory
    for rank, world_size, words in ((1, RANKS, "is held by process"), (RANKS, RANKS + 1, "the server has 2 ranks")):
        with pytest.raises(HandshakeError, match=words):
            Lifeline(directory, rank=rank, world_size=world_size, deadline=Deadline(5.0), ended=lambda: None)
    fleet.part(1)
    genuine = directory._secret.read_text()
    directory._secret.write_text("guessed")
    try:
        with pytest.raises(HandshakeError, match="secret"):
            Lifeline(directory, rank=1, world_size=RANKS, deadline=Deadline(5.0), ended=lambda: None)
    finally:
        directory._secret.write_text(genuine)
    assert directory.path.stat().st_mode & 0o077 == 0
    place = ParallelConfig(rank=1, world_size=RANKS, tensor_parallel_size=RANKS)
    fleet.join(1, Worker(small_model(), backend="held", parallel_config=place))
    fleet.check_recovers()


def test_readers_that_outlast_a_trainer_s_finish_leave_its_link_up(fleet: FleetScene) -> None:
    fleet.use(backend=None)
    client = HTTPVLLMWeightSyncClient(fleet.url)
    trainer = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(timeout=30.0), client=client, source=ModuleSource(small_model(6.0))
    )
    try:
        fleet.read()
        with pytest.raises(WeightwireError, match="readers did not finish"):
            trainer.send_weights(timeout=2.0)
        assert (fleet.value(), info(fleet)["link"]) == (0.0, "up")
        fleet.release()
        report = trainer.send_weights(weight_version="six")
        assert not report.reinitialised
        assert (fleet.value(), info(fleet)["revision"]) == (6.0, report.revision)
    finally:
        trainer.shutdown()
        client.shutdown_weight_transfer_engine()
        client.close()
