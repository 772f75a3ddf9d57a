"""`weightwire push`, `verify` and `status` against real worker servers, the command in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from plugins.cli.tests.scene import Model, held, info, run, run_json, serve_telling, serve_worker, write
from plugins.cli.tests.test_policy import trainer
from weightwire.testing.fixtures import BorrowRanks

FACTORY = """
import torch
from plugins.cli.tests.test_policy import trainer
from plugins.cli.tests.scene import Model

def model():
    return Model(3.0)

def state():
    return Model(4.0).state_dict()

def wrong():
    return 5

def broken():
    raise RuntimeError("no GPU here")
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(write(tmp_path / "a.safetensors"))


def test_a_push_and_what_it_says(ranks: BorrowRanks, checkpoint: str) -> None:
    command, first, second = ranks(3)
    urls = [rank.call(serve_worker) for rank in (first, second)]
    to = ["--to", urls[0], "--to", f"{urls[1]}/"]
    before = first.call(info)["revision"]
    result, output, errors = command.call(run, "push", checkpoint, *to, "--label", "step-7", "--verify")
    assert (result, errors) == (0, "")
    assert "6 parameters" in output
    for url in urls:
        assert url in output
        assert f"equal  {url}" in output
    assert f"{before['lineage'][:8]}/0 -> " in output
    assert "default -> step-7" in output
    assert first.call(held) == second.call(held)
    assert first.call(info)["weight_version"] == "step-7"
    assert command.call(run, "verify", checkpoint, *to)[0] == 0


def test_json(ranks: BorrowRanks, checkpoint: str) -> None:
    command, worker = ranks(2)
    url = worker.call(serve_worker)
    result, record = run_json(command, "push", checkpoint, "--to", url, "--label", "v1", "--pause", "keep", "--verify")
    assert result == 0
    assert (record["scope"], record["label"], record["parameters"]) == ("full", "v1", 6)
    (server,) = record["servers"]
    assert (server["server"], server["committed"], server["differences"]) == (url, True, [])
    assert (server["before"]["weight_version"], server["after"]["weight_version"]) == ("default", "v1")
    assert server["after"]["revision"] == record["revision"]
    assert server["after"]["gate"] == "open"


def test_a_server_that_dies_after_the_commit(ranks: BorrowRanks, checkpoint: str) -> None:
    command, worker = ranks(2)
    url = worker.call(serve_worker)
    worker.at("worker.committed", "hold")
    pushing = command.start(run, "push", checkpoint, "--to", url, "--verify", "--timeout", "20")
    worker.reached("worker.committed")
    worker.kill()
    result, output, errors = pushing.result()
    assert result == 1
    assert output + errors == errors
    assert "worker rank 0" in errors


def test_a_partial_update(ranks: BorrowRanks, checkpoint: str) -> None:
    command, worker = ranks(2)
    url = worker.call(serve_worker)
    before = worker.call(held)
    only = ["--only", "layers.*.weight", "--only", "norm"]
    result, record = run_json(command, "push", checkpoint, "--to", url, *only, "--verify")
    assert (result, record["scope"], record["parameters"]) == (0, "partial", 3)
    after = worker.call(held)
    assert {name for name in after if after[name] != before[name]} == {"layers.0.weight", "layers.1.weight", "norm"}
    assert command.call(run, "verify", checkpoint, "--to", url, *only)[0] == 0
    result, findings = run_json(command, "verify", checkpoint, "--to", url)
    assert result == 1
    assert {(one["name"], one["kind"]) for one in findings[url]} == {
        ("embed", "differs"),
        ("layers.1.bias", "differs"),
        ("seen", "differs"),
    }


def test_what_a_dry_run_finds(ranks: BorrowRanks, tmp_path: Path) -> None:
    command, worker = ranks(2)
    url = worker.call(serve_worker)
    before = worker.call(held), worker.call(info)
    tensors = load_file(write(tmp_path / "good.safetensors"))
    assert run_json(command, "push", str(tmp_path / "good.safetensors"), "--to", url, "--dry-run")[0] == 0
    tensors["layers.1.weigth"] = tensors.pop("layers.1.weight")
    save_file(tensors, tmp_path / "bad.safetensors")
    result, record = run_json(command, "push", str(tmp_path / "bad.safetensors"), "--to", url, "--dry-run")
    assert result == 1
    (plan,) = record["servers"]
    assert not plan["fits"]
    assert "layers.1.weight" in plan["lacking"]
    (refusal,) = plan["refused"]
    assert (refusal["name"], refusal["nearest"][0]) == ("layers.1.weigth", "layers.1.weight")
    result, output, _ = command.call(run, "push", str(tmp_path / "bad.safetensors"), "--to", url, "--dry-run")
    assert result == 1
    assert "nearest: layers.1.weight" in " ".join(output.split())
    assert "nothing was moved" in output
    assert (worker.call(held), worker.call(info)) == before


def test_a_dry_run_where_the_server_tells_shapes(ranks: BorrowRanks, tmp_path: Path) -> None:
    command, worker = ranks(2)
    url = worker.call(serve_telling)
    tensors = Model(7.0).state_dict()
    del tensors["seen"]
    tensors["embed"] = tensors["embed"][:3].clone()
    tensors["norm"] = tensors["norm"].float()
    save_file(tensors, tmp_path / "bad.safetensors")
    result, record = run_json(command, "push", str(tmp_path / "bad.safetensors"), "--to", url, "--dry-run")
    (plan,) = record["servers"]
    assert (result, plan["details"], plan["lacking"], plan["taken"]) == (1, True, [], 3)
    assert {one["name"]: one["why"] for one in plan["refused"]} == {
        "embed": "shape (3, 16) here, (4, 16) there",
        "norm": "float32 here, bfloat16 there",
    }
    only = ["--only", "layers.*"]
    assert run_json(command, "push", str(tmp_path / "bad.safetensors"), "--to", url, "--dry-run", *only)[0] == 0
    result, findings = run_json(command, "verify", str(tmp_path / "bad.safetensors"), "--to", url)
    assert result == 1
    assert [one["name"] for one in findings[url] if one["kind"] == "not comparable"] == ["embed", "norm"]


def test_a_refusal_is_one_line(ranks: BorrowRanks, tmp_path: Path) -> None:
    command, worker = ranks(2)
    url = worker.call(serve_worker)
    path = str(write(tmp_path / "wide.safetensors", width=17))
    result, output, errors = command.call(run, "push", path, "--to", url)
    assert (result, output) == (1, "")
    assert errors.startswith("weightwire push: ")
    assert errors.count("\n") == 1
    assert "worker rank 0" in errors
    assert "'embed' has shape (4, 16) here, and (4, 17) in the update" in errors
    assert "Traceback" in command.call(run, "push", path, "--to", url, "--debug")[2]
    result, record = run_json(command, "push", path, "--to", url)
    assert (result, record["error"]["type"]) == (1, "UpdateRefused")
    assert worker.call(info)["weight_version"] == "default"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["push", "PATH"], 2, "Missing option '--to'"),
        (["push", "PATH", "--to", "localhost:8000"], 2, "is no URL such as"),
        (["push", "PATH", "--to", "http://h:1", "--to", "http://h:1/"], 2, "is given twice"),
        (["push", "PATH", "--to", "http://127.0.0.1:9", "--pause", "now"], 2, "'now' is not one of"),
        (["push", "PATH", "--to", "http://127.0.0.1:9", "--token-file", "/absent"], 2, "cannot be read"),
        (["push", "PATH", "--to", "http://127.0.0.1:9", "--token", " "], 2, "the token is empty"),
        (["push", "/absent", "--to", "http://127.0.0.1:9"], 1, "/absent cannot be read: No such file or directory"),
        (["push", "PATH", "--to", "http://127.0.0.1:9"], 1, "could not be reached"),
        (["push", "PATH", "--to", "http://127.0.0.1:9", "--backend", "bogus"], 1, "could not be reached"),
        (["push", "PATH", "--to", "http://127.0.0.1:9", "--only", "x*"], 1, "matches 'x*'"),
        (["push", "PATH", "--to", "http://127.0.0.1:9", "--policy", "quorum"], 1, "policy 'quorum' is not met: 0 of 1"),
        (["push", "PATH", "--to", "http://127.0.0.1:9", "--device", "tpu0"], 1, "there is no device 'tpu0' here"),
        (["push", "absent_module:make", "--to", "http://127.0.0.1:9"], 1, "there is no module 'absent_module'"),
        (["push", "json:absent", "--to", "http://127.0.0.1:9"], 1, "is no factory"),
        (["verify", "PATH", "--to", "http://127.0.0.1:9"], 1, "could not be reached"),
        (["status"], 2, "Missing argument 'URL...'"),
    ],
)
def test_wrong_calls(checkpoint: str, arguments: list[str], status: int, words: str) -> None:
    arguments = [checkpoint if one == "PATH" else one for one in arguments]
    result, output, errors = run({}, *arguments, environment={"COLUMNS": "200"})
    assert (result, output) == (status, "")
    assert words in errors
    assert "Traceback" not in errors
    if status == 1:
        assert errors.count("\n") == 1


def test_factories(ranks: BorrowRanks, tmp_path: Path) -> None:
    command, worker = ranks(2)
    (tmp_path / "my_factories.py").write_text(FACTORY)
    url = worker.call(serve_worker)

    def push(name: str) -> Any:
        return command.call(run, "push", f"my_factories:{name}", "--to", url, "--verify", directory=str(tmp_path))

    assert push("model")[0] == 0
    first = worker.call(held)
    assert push("state")[0] == 0
    assert worker.call(held) != first
    result, _, errors = push("wrong")
    assert (result, "gave a int, not a module" in errors) == (1, True)
    result, _, errors = push("broken")
    assert (result, errors) == (1, "weightwire push: RuntimeError: no GPU here\n")


def test_tokens(ranks: BorrowRanks, checkpoint: str, tmp_path: Path) -> None:
    command, worker = ranks(2)
    url = worker.call(serve_worker, token="open sesame")
    (tmp_path / "token").write_text("open sesame\n")
    for given, environment in (
        (["--token", "open sesame"], {}),
        (["--token-file", str(tmp_path / "token")], {}),
        ([], {"WEIGHTWIRE_TOKEN": "open sesame"}),
    ):
        result, _, errors = command.call(run, "push", checkpoint, "--to", url, *given, environment=environment)
        assert (result, errors) == (0, "")
    result, output, errors = command.call(run, "push", checkpoint, "--to", url, "--token", "open barley")
    assert result == 1
    assert "the token is not the one" in errors
    assert "barley" not in output + errors
    assert command.call(run, "status", url)[0] == 1


def test_status(ranks: BorrowRanks, checkpoint: str) -> None:
    command, worker = ranks(2)
    url, absent = worker.call(serve_worker), "http://127.0.0.1:9"
    result, record = run_json(command, "status", url)
    assert (result, record[url]["state"]) == (0, "uninitialised")
    result, record = run_json(command, "status", url, absent)
    assert (result, record[absent]["state"]) == (1, "unreachable")
    result, output, _ = command.call(run, "status", url, absent)
    assert result == 1
    assert f"{url}" in output
    assert "unreachable" in output


def test_a_trainer_that_is_connected(ranks: BorrowRanks, checkpoint: str) -> None:
    command, worker, other = ranks(3)
    url = worker.call(serve_worker)
    # A push leaves the workers when it is done, so that the next one need not take them over.
    assert [command.call(run, "push", checkpoint, "--to", url)[0] for _ in range(2)] == [0, 0]
    other.call(trainer, [url], "all", 5.0)
    result, _, errors = command.call(run, "push", checkpoint, "--to", url)
    assert result == 1
    assert "is connected and alive: stop it first, or pass takeover=True" in errors
    result, _, errors = command.call(run, "push", checkpoint, "--to", url, "--takeover", "--verify")
    assert (result, errors) == (0, "")
