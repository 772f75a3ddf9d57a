"""`weightwire serve`: what it takes, what it says when it does not, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from torch import nn

from weightwire_cli import serve
from weightwire_cli.serve import Mistake, load_model, main

MODULE = """
from torch import nn

class Loader:
    def load_weights(self, weights):
        return {name for name, _ in weights}

class Nested:
    make = staticmethod(lambda: nn.Linear(1, 1))

ready_made = nn.Linear(2, 2)
number = 7

def model():
    return nn.Linear(3, 4)

def nothing():
    return None

def broken():
    raise OSError("the disk is on fire")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module in it, from which things are started."""
    (tmp_path / "served_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sys.modules.pop("served_here", None)


@pytest.mark.parametrize("name", ["model", "ready_made", "Nested.make", "Loader"])
def test_what_is_served(folder: Path, name: str) -> None:
    made = load_model(f"served_here:{name}")
    assert isinstance(made, nn.Module) or callable(made.load_weights)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("served_here", "neither a folder nor MODULE:FACTORY"),
        ("nowhere:model", "there is no module 'nowhere'"),
        ("served_here:modle", "module 'served_here' has no 'modle'"),
        ("served_here:number", "is a int and cannot be called"),
        ("served_here:nothing", "made a NoneType: it has to be an nn.Module or an object with load_weights"),
        ("served_here:broken", "served_here:broken raised OSError: the disk is on fire"),
    ],
)
def test_what_cannot_be_served(folder: Path, target: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([target]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.startswith("weightwire serve: ") and told.count("\n") == 1
    assert main([target, "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_module_that_fails_to_import_says_so_itself(folder: Path) -> None:
    (folder / "served_broken.py").write_text("import no_such_thing_at_all")
    with pytest.raises(Mistake, match="importing served_broken raised ModuleNotFoundError: No module"):
        load_model("served_broken:model")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--host", "0.0.0.0"], 1, "pass a token, or listen on 127.0.0.1"),
        (["--host", "192.0.2.1", "--token", "t"], 1, "192.0.2.1"),
        (["--token", " "], 2, "the token is empty"),
        (["--token", "a", "--token-file", "b"], 2, "not both"),
        (["--token-file", "missing"], 2, "missing cannot be read"),
        (["--tls-key", "key.pem"], 2, "give both --tls-certificate and --tls-key"),
        (["--tls-certificate", "no.pem", "--tls-key", "no.key"], 2, "no.pem is no file"),
    ],
)
def test_wrong_options(
    folder: Path, options: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["served_here:model", "--port", "0", *options]) == status
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("variables", "options", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, [], "the ranks of one server are on one machine"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["--workers", "3"], "the launcher has started 2 ranks"),
    ],
)
def test_what_a_launcher_cannot_do(
    folder: Path,
    variables: dict[str, str],
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["served_here:model", "--port", "0", *options]) == 1
    assert f"weightwire serve, rank {variables['RANK']}: {words}" in capsys.readouterr().err


def test_a_rank_that_cannot_start(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "served_broken.py").write_text("import no_such_thing_at_all")
    before = set(Path(tempfile.gettempdir()).glob("weightwire-*"))
    assert main(["served_broken:model", "--port", "0", "--workers", "2"]) == 1
    told = capfd.readouterr().err
    assert "rank 0: importing served_broken raised ModuleNotFoundError" in told or "rank 1: importing" in told
    assert re.search(r"weightwire serve: rank \d \(pid \d+\) ended with status 2 before all ranks were ready", told)
    assert set(Path(tempfile.gettempdir()).glob("weightwire-*")) <= before


@pytest.mark.parametrize("options", [["--workers", "0"], ["--staging", "sideways"], ["--port", "99999"], []])
def test_usage(options: list[str]) -> None:
    assert main(options and ["served_here:model", *options]) == 2


def test_the_token_s_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve.read_token(None, None) is None
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", "of the environment")
    (folder / "token").write_text("of the file\n")
    assert serve.read_token(None, None) == "of the environment"
    assert serve.read_token(None, folder / "token") == "of the file"
    assert serve.read_token("of the call", None) == "of the call"


def test_without_the_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "weightwire_server", None)
    monkeypatch.delitem(sys.modules, "weightwire_server.launching", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *unused: None)
    assert main(["served_here:model"]) == 2
    assert "pip install weightwire-server" in capsys.readouterr().err


def test_a_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    assert type(load_model(str(tmp_path / "model"))).__name__ == "GPT2LMHeadModel"
    (tmp_path / "empty").mkdir()
    with pytest.raises(Mistake, match="empty is no Hugging Face model folder"):
        load_model(str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Mistake, match="weightwire-cli\\[huggingface\\]"):
        load_model(str(tmp_path / "model"))


def test_one_line_and_an_end_in_order(folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WEIGHTWIRE_TOKEN": "open-sesame"}
    command = [sys.executable, "-m", "weightwire_cli.serve", "served_here:model", "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split()[3].rstrip(",")
        assert line == f"weightwire: serving at {url}, Ctrl-C ends it\n"
        assert httpx.get(f"{url}/weight_info", trust_env=False).status_code == 401
        good = {"Authorization": "Bearer open-sesame"}
        assert httpx.get(f"{url}/weight_info", headers=good, trust_env=False).json()["state"] == "uninitialised"
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=30)
    assert (process.returncode, said, complained) == (0, "", "")
