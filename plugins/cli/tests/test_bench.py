from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightwire import discovery
from weightwire_cli.bench import main, parse_size

MODULE = """
from weightwire.testing.floors import PerTensorSend, RawSend
from weightwire.testing.measure import Case, Options, Seat, Way, model_like

class Lossy(Way):
    name = "lossy"
    def step(self, seat: Seat) -> None:
        pass

def cases(options: Options) -> list[Case]:
    payload = model_like(options.nbytes, tensors=options.tensors)
    ways = [PerTensorSend(), RawSend()]
    return [
        Case(name="1to1", payload=payload, receivers=1, ways=ways, subject="raw_send",
             references={"per_tensor": ("per_tensor_send",)}),
        Case(name="lossy", payload=payload, receivers=1, ways=[Lossy()], subject="lossy"),
    ]
"""


@pytest.fixture(autouse=True)
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution that is installed, as far as importlib.metadata can see, and contributes a benchmark."""
    (tmp_path / "acme_bench_cases.py").write_text(MODULE)
    info = tmp_path / "acme_bench-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-bench\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[weightwire.bench]\nacme = acme_bench_cases\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    discovery.refresh()
    yield
    monkeypatch.undo()
    discovery.refresh()


TINY = ["--backend", "acme", "--size", "512KiB", "--tensors", "26", "--rounds", "2"]


def test_a_table_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--case", "1to1"]) == 0
    out = capsys.readouterr().out
    assert "26 tensors of a Qwen2-like model" in out
    assert "per_tensor_send" in out
    assert "acme.1to1.per_tensor" in out


def test_json_on_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--case", "1to1", "--no-memory", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() >= {"machine", "payload", "runs", "ratios"}
    assert [run["name"] for run in report["runs"]] == ["per_tensor_send", "raw_send"]
    assert all(run["bit_equal"] and len(run["seconds"]) == 2 for run in report["runs"])
    assert report["ratios"].keys() == {"acme.1to1.per_tensor"}


def test_json_in_a_file_and_bytes_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert main([*TINY, "--case", "lossy", "--json", str(file)]) == 1
    assert json.loads(file.read_text())["runs"][0]["bit_equal"] is False
    assert "bytes differed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--backend", "bogus"], 1, "no installed distribution has a benchmark for 'bogus'; there are: acme"),
        ([*TINY, "--case", "1to9"], 2, "no case 1to9; there are: 1to1, lossy"),
        (["--size", "many"], 2, "'many' is not a size"),
        (["report.json"], 2, "a FILE is for --json"),
        (["--rounds", "0"], 2, "--rounds"),
        (["--wrong"], 2, "No such option"),
    ],
)
def test_wrong_calls(arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == status
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1GiB", 1 << 30), ("64 MiB", 64 << 20), ("10MB", 10**7), ("4096", 4096), ("1.5kib", 1536), ("7B", 7)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
