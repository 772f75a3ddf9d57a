"""Bodies, queries and headers: what vLLM's clients send is taken, everything else is refused by name."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from plugins.server.tests.scene import Scene, small_model
from weightwire.messages import ParallelConfig
from weightwire.worker import Worker

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "content", "param", "words"),
    [
        ("/init_weight_transfer_engine", b"", "init_info", "missing key"),
        ("/init_weight_transfer_engine", b"{", None, "not JSON"),
        ("/init_weight_transfer_engine", b'"\xff"', None, "not JSON"),
        ("/init_weight_transfer_engine", b"[" * 100_000, None, "not JSON"),
        ("/init_weight_transfer_engine", b"[]", None, "expected an object"),
        ("/init_weight_transfer_engine", b'{"init_info": []}', "init_info", "is a list"),
        ("/init_weight_transfer_engine", b'{"init_info": {"speed": 9}}', None, "unknown key 'speed'"),
        ("/init_weight_transfer_engine", b'{"init_info": {"hold": 9}}', None, "must be bool"),
        ("/init_weight_transfer_engine", b'{"init_info": {"weightwire": {}}}', None, "missing key"),
        ("/update_weights", b'{"updates": {}}', "updates", "unknown key"),
        ("/update_weights", b'{"update_info": null}', "update_info", "missing key"),
        ("/update_weights", b'{"update_info": "all"}', "update_info", "is a string"),
        ("/update_weights", b'{"update_info": [{}, {}]}', None, "2 elements for 1 workers"),
        ("/update_weights", b'{"update_info": [1]}', None, "must be an object"),
        ("/finish_weight_update", b'{"weight_version": 7}', "weight_version", "is a number"),
        ("/update_weight_version", b"{}", "new_version", "missing key"),
        ("/weight_checker", b'{"action": "guess"}', "action", "checksum, reset or compare"),
        ("/weight_checker", b'{"action": "compare"}', "baseline", "needs a baseline"),
    ],
)
def test_wrong_body(scene: Scene, path: str, content: bytes, param: str | None, words: str) -> None:
    scene.enter("open")
    answer = scene.post(path, headers=JSON, content=content)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    scene.check_recovers()


@pytest.mark.parametrize(
    ("info", "status", "words"),
    [
        ({"colour": "red"}, 400, "unknown key 'colour'"),
        ({"value": "much"}, 400, "value must be float"),
        ({"scope": "some"}, 400, "scope must be"),
        ({"metadata": [{"name": "0.weight"}]}, 400, "missing keys"),
        ({"metadata": [{"name": "head", "dtype": "float32", "shape": [2]}]}, 400, "'head'"),
        ({"metadata": []}, 400, "0.weight"),
        ({"fail": "it burns"}, 500, "it burns"),
    ],
)
def test_wrong_update_ends_the_update(scene: Scene, info: dict[str, Any], status: int, words: str) -> None:
    scene.enter("open")
    answer = scene.post("/update_weights", {"update_info": {**scene.update_info(), **info}})
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]
    # Where the data plane itself failed, the link is down too.
    assert answer.json()["state"] == ("uninitialised" if status == 500 else "ready")
    assert scene.value() == 0.0
    scene.check_recovers()


def test_finish_before_every_name_came(scene: Scene) -> None:
    scene.enter("open")
    assert scene.update("u1", 0, skip="1.bias").status_code == 200
    answer = scene.finish("u1", "half")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "1.bias"
    assert (answer.json()["state"], answer.json()["weight_version"]) == ("ready", "default")
    scene.check_recovers()


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Weightwire-Timeout", "soon"),
        ("Weightwire-Timeout", "-1"),
        ("Weightwire-Timeout", "nan"),
        ("Weightwire-Update", "x" * 129),
        ("Weightwire-Sequence", "-1"),
        ("Weightwire-Sequence", "1.5"),
    ],
)
def test_wrong_header(scene: Scene, header: str, value: str) -> None:
    scene.enter("open")
    answer = scene.post("/update_weights", {"update_info": scene.update_info()}, headers={header: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header
    assert scene.get("/weight_info").json()["update"] == "open"


@pytest.mark.parametrize("query", ["mode=sleep", "clear_cache=perhaps"])
def test_wrong_query(scene: Scene, query: str) -> None:
    answer = scene.post(f"/pause?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]
    assert scene.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_and_resume(scene: Scene, mode: str) -> None:
    assert scene.post(f"/pause?mode={mode}&clear_cache=false").json() == {"status": "paused"}
    assert scene.get("/is_paused").json() == {"is_paused": True}
    assert scene.get("/weight_info").json()["gate"] == f"paused({mode})"
    assert scene.post("/resume").json() == {"status": "resumed"}
    assert scene.get("/is_paused").json() == {"is_paused": False}


def test_pause_that_readers_outlast(scene: Scene) -> None:
    scene.read()
    answer = scene.post("/pause?mode=wait", headers={"Weightwire-Timeout": "0.05"})
    assert answer.status_code == 504
    assert scene.get("/is_paused").json() == {"is_paused": True}


def test_a_list_has_one_element_per_worker(scene: Scene) -> None:
    scene.enter("open")
    assert scene.post("/update_weights", {"update_info": [scene.update_info(value=4.0)]}).status_code == 200
    assert scene.finish(label="v4").status_code == 200
    assert scene.value() == 4.0


def test_the_host_picks_this_rank_s_element(scene: Scene) -> None:
    place = ParallelConfig(rank=1, world_size=2, tensor_parallel_size=2, data_parallel_size=2, data_parallel_index=1)
    scene.use(Worker(small_model(), backend="held", parallel_config=place))
    assert scene.get("/get_world_size").json() == {"world_size": 4}
    assert scene.get("/get_world_size?include_dp=false").json() == {"world_size": 2}
    scene.enter("open")
    elements = [scene.update_info(value=float(rank)) for rank in range(4)]
    assert scene.post("/update_weights", {"update_info": elements[:3]}).status_code == 400
    assert scene.post("/update_weights", {"update_info": elements}).status_code == 200
    assert scene.finish().status_code == 200
    assert scene.value() == 3.0
    keys = scene.post("/weight_checker", {"action": "checksum"}).json()["checksums"]
    assert "dp1:pp0:pcp0:tp1:0.weight" in keys


def test_labels(scene: Scene) -> None:
    before = scene.get("/weight_info").json()
    assert before["weight_version"] == "default"
    answer = scene.post("/update_weight_version", {"new_version": "step 7"})
    assert answer.json() == {"success": True, "new_version": "step 7"}
    assert scene.get("/weight_info").json() == {**before, "weight_version": "step 7"}
    scene.init()
    scene.push(label="step 8")
    after = scene.get("/weight_info").json()
    assert after["weight_version"] == "step 8" and after["revision"] != before["revision"]
    scene.push()
    assert scene.get("/weight_info").json()["weight_version"] == "step 8"


def test_checksums(scene: Scene) -> None:
    scene.use(Worker(small_model(1.5), backend="held"))
    found = scene.post("/weight_checker", {"action": "checksum"}).json()["checksums"]
    assert list(found) == [f"dp0:pp0:pcp0:tp0:{name}" for name in scene.names()]
    expected = hashlib.sha256(torch.full((4, 3), 1.5).numpy().tobytes()).hexdigest()
    assert found["dp0:pp0:pcp0:tp0:0.weight"] == expected

    def compare(baseline: dict[str, str]) -> Any:
        return scene.post("/weight_checker", {"action": "compare", "baseline": baseline}).json()

    assert compare(found) == {"match": True, "mismatches": []}
    bias, weight = "dp0:pp0:pcp0:tp0:0.bias", "dp0:pp0:pcp0:tp0:0.weight"
    other = {key: value for key, value in found.items() if key != bias} | {weight: "00", "zzz": "00"}
    assert compare(other) == {"match": False, "mismatches": [bias, weight, "zzz"]}


def test_reset(scene: Scene) -> None:
    scene.use(Worker(small_model(1.5), backend="held"))
    assert scene.post("/weight_checker", {"action": "reset"}).json() == {"status": "reset"}
    assert scene.value() == 0.0
    assert scene.get("/weight_info").json()["state"] == "torn"
    assert scene.get("/health").json()["error"]["type"] == "WeightsTorn"
    scene.check_recovers()
    assert scene.get("/health").json() == {"status": "ok"}


def test_body_limit(scene: Scene) -> None:
    scene.use(body_limit=1000)
    scene.enter("open")
    body = b'{"update_info": {"metadata": "' + b"x" * 5_000_000 + b'"}}'

    def unannounced() -> Iterator[bytes]:
        for at in range(0, len(body), 65536):
            yield body[at : at + 65536]

    for content in (body, unannounced()):
        answer = scene.post("/update_weights", headers=JSON, content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "PayloadTooLarge"
    assert scene.get("/weight_info").json()["update"] == "open"


def test_token(scene: Scene) -> None:
    scene.use(token="open sesame")
    for headers in ({}, {"Authorization": "Bearer open"}, {"Authorization": "open sesame"}):
        for path in ("/weight_info", "/metrics"):
            answer = scene.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "Unauthorized"
            assert "sesame" not in answer.text
        assert scene.post("/pause", headers=headers).status_code == 401
    assert not scene.worker.is_paused
    assert scene.get("/health").status_code == 200
    assert scene.post("/pause", headers={"Authorization": "Bearer open sesame"}).status_code == 200
    with pytest.raises(ValueError, match="empty"):
        scene.use(token=" ")


def test_unknown_paths_and_methods(scene: Scene) -> None:
    for answer, status in ((scene.get("/nothing"), 404), (scene.get("/pause"), 405), (scene.post("/health"), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == status
        assert answer.json()["state"] == "uninitialised"


def test_a_bug_is_500_and_logged(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(**unused: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(scene.worker, "shutdown", fails)
    with caplog.at_level(logging.ERROR):
        answer = scene.post("/shutdown_weight_transfer_engine")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "KeyError: 'a bug'"
    assert caplog.records[0].exc_info is not None


def test_abort_requests(either: Scene) -> None:
    aborted: list[list[str] | None] = []

    async def abort_requests(ids: list[str] | None) -> int:
        aborted.append(ids)
        return 7 if ids is None else len(ids)

    either.use(abort_requests=abort_requests)
    path = "/abort_requests"
    assert either.post(path).json() == {"status": "aborted", "aborted": 7}
    assert either.post(path, {"request_ids": ["a", "b"]}).json() == {"status": "aborted", "aborted": 2}
    assert either.post(path, {"request_ids": [1]}).json()["error"]["param"] == "request_ids"
    assert aborted == [None, ["a", "b"]]


def test_metrics(scene: Scene) -> None:
    scene.enter("receiving")
    page = scene.get("/metrics").text
    assert 'vllm:rl_weight_update_operations_in_flight{operation="update"} 1.0' in page
    scene.release()
    scene.finish("u1")
    page = scene.get("/metrics").text
    assert 'vllm:rl_weight_update_operations_in_flight{operation="update"} 0.0' in page
    for operation in ("init", "start", "update", "finish"):
        assert f'vllm:rl_weight_update_operation_duration_seconds_count{{operation="{operation}"}} 1.0' in page
