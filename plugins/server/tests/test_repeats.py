"""Ids: every call of an update may be repeated and gets the answer that the first one got; one rank or several."""

from __future__ import annotations

import pytest

from plugins.server.tests.scene import Scene, until


def test_a_whole_update_repeated_call_by_call_commits_once(either: Scene) -> None:
    scene = either
    scene.init()
    for _ in range(2):
        assert scene.start("u1").json() == {"message": "Weight update started"}
    for _ in range(2):
        assert scene.update("u1", 0, value=2.0).json() == {"message": "Weights updated"}
    assert scene.finish("u1", "v2").status_code == 200
    committed = scene.get("/weight_info").json()
    assert committed["weight_version"] == "v2"

    assert scene.update("u1", 0).status_code == 200
    assert scene.finish("u1", "another").status_code == 200
    assert scene.get("/weight_info").json() == committed
    assert scene.value() == 2.0


def test_a_repetition_of_a_running_update_waits_for_it(either: Scene) -> None:
    scene = either
    scene.enter("receiving")
    again = scene.waiting(lambda: scene.update("u1", 0))
    assert scene.update("u1", 1).status_code == 409
    assert not again.done()
    scene.release()
    assert again.result().status_code == 200
    assert scene.finish("u1").status_code == 200


def test_a_failure_is_repeated_in_the_same_words(either: Scene) -> None:
    scene = either
    scene.init()
    scene.start("u1")
    first = scene.update("u1", 0, fail="the cable came loose")
    again = scene.update("u1", 0)
    assert first.status_code == again.status_code == 500
    assert first.json()["error"] == again.json()["error"]
    assert "the cable came loose" in first.json()["error"]["message"]
    finish = scene.finish("u1")
    assert finish.status_code == 409
    assert "the cable came loose" in finish.json()["error"]["message"]
    scene.check_recovers()


def test_a_committed_update_cannot_be_aborted(either: Scene) -> None:
    scene = either
    scene.init()
    scene.push(3.0, update="u1")
    answer = scene.post("/abort_weight_update", update="u1")
    assert answer.status_code == 409
    assert "committed" in answer.json()["error"]["message"]
    assert scene.value() == 3.0


def test_an_aborted_update_is_over(either: Scene) -> None:
    scene = either
    scene.enter("open")
    scene.update("u1", 0)
    assert scene.post("/abort_weight_update", update="u1").status_code == 200
    for answer in (scene.start("u1"), scene.update("u1", 1), scene.finish("u1")):
        assert answer.status_code == 409
        assert "abort" in answer.json()["error"]["message"]
    assert scene.value() == 0.0
    scene.check_recovers()


@pytest.mark.parametrize("state", ["open", "receiving"])
def test_another_init_supersedes_the_update(either: Scene, state: str) -> None:
    scene = either
    scene.enter(state)
    assert scene.init().status_code == 200
    answer = scene.update("u1", 5)
    assert answer.status_code == 409
    assert answer.json()["error"]["type"] == "Superseded"
    scene.check_recovers()


def test_an_abort_ends_a_running_update(either: Scene) -> None:
    scene = either
    scene.enter("receiving")
    running = scene.running[-1]
    assert scene.post("/abort_weight_update", update="u1").status_code == 200
    answer = running.result(2.0)
    assert answer.status_code == 409
    assert answer.json()["error"]["type"] == "TransferAborted"
    assert scene.value() == 0.0
    scene.check_recovers()


def test_a_silent_trainer_loses_its_update(either: Scene) -> None:
    scene = either
    scene.init()
    assert scene.start("u1", headers={"Weightwire-Timeout": "0.05"}).status_code == 200
    until(lambda: scene.get("/weight_info").json()["update"] == "none", seconds=5.0)
    answer = scene.update("u1", 0)
    assert answer.status_code == 409
    assert "silent" in answer.json()["error"]["message"]
    scene.check_recovers()
