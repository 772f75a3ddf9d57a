from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import importlib_metadata
import pytest

from core.tests.fake_site import FakeSite
from weightwire import __version__, command, discovery

COMMAND = """
    def main(argv):
        print("called with", argv)
        return len(argv)
"""


def add_command(site: FakeSite, distribution: str, name: str, text: str = COMMAND) -> None:
    package = distribution.replace("-", "_")
    site.module(f"{package}.commands", text)
    site.distribution(distribution, {command.GROUP: {name: f"{package}.commands:main"}})


def test_plugins_as_a_table(fake_site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    fake_site.transport("acme-weightwire", "acme", aliases=("fast",))
    fake_site.transport("bad-weightwire", "bad", plugin="import nothing_of_that_name")
    assert command.main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if not line.startswith("    ")] == [
        ["TRANSPORT", "DISTRIBUTION", "VERSION", "STATE"],
        ["acme", "(fast)", "acme-weightwire", "1.0", "ready"],
        ["bad", "bad-weightwire", "1.0", "broken"],
        ["nccl", "weightwire-nccl", __version__, "ready"],
    ]
    assert "No module named 'nothing_of_that_name'" in lines[3]
    assert "weightwire doctor bad" in lines[3]


def test_plugins_as_json(fake_site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    fake_site.transport("acme-weightwire", "acme", api=(9, 0))
    assert command.main(["plugins", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    acme, nccl = answer["transports"]
    assert (acme["name"], acme["state"], acme["distribution"]) == ("acme", "incompatible", "acme-weightwire")
    assert acme["reason"]
    assert acme["remedy"]
    assert (nccl["state"], nccl["wire"], nccl["api"]) == ("ready", 1, [1, 0])
    assert answer["weightwire"] == __version__


def test_plugins_fails_when_strict(fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_STRICT", "1")
    assert command.main(["plugins"]) == 0
    fake_site.transport("acme-weightwire", "nccl")
    assert command.main(["plugins"]) == 1


def test_nothing_installed(
    fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib_metadata, "entry_points", lambda group: ())
    discovery.refresh()
    assert command.main(["plugins"]) == 0
    assert "pip install weightwire-nccl" in capsys.readouterr().out
    assert command.main(["doctor"]) == 1


def test_doctor_shows_where_it_broke(fake_site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    fake_site.transport("acme-weightwire", "acme", plugin="import nothing_of_that_name")
    assert command.main(["doctor"]) == 1
    words = capsys.readouterr().out
    assert "Traceback" in words
    assert "plugin.py" in words
    assert command.main(["doctor", "acme"]) == 1
    assert command.main(["doctor", "nccl"]) == 0
    assert "Traceback" not in capsys.readouterr().out.split("nccl, weightwire-nccl")[1]


@pytest.mark.parametrize(("name", "words"), [("ipc", "pip install weightwire-ipc"), ("bogus", "'bogus'")])
def test_doctor_of_what_is_not_installed(
    fake_site: FakeSite, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    assert command.main(["doctor", name]) == 1
    assert words in capsys.readouterr().err


def test_command_of_another_distribution(fake_site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    add_command(fake_site, "acme-tools", "acme")
    assert command.main(["acme", "--size", "1"]) == 2
    assert capsys.readouterr().out == "called with ['--size', '1']\n"
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "acme" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plan", "pip install weightwire-absent"),
        ("pluggins", "did you mean 'plugins'?"),
        ("zzzzzz", "see weightwire --help"),
    ],
)
def test_missing_command_says_how_to_have_it(
    fake_site: FakeSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setitem(command.COMMANDS, "plan", "weightwire-absent")
    assert command.main([name]) == 2
    assert words in capsys.readouterr().err


def test_command_of_a_later_version(
    fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "COMMANDS", {"prune": "weightwire-cli"})
    assert command.main(["prune"]) == 2
    words = f"'prune' is not in weightwire-cli {__version__}: pip install --upgrade weightwire-cli"
    assert words in capsys.readouterr().err


def test_command_that_cannot_be_imported(fake_site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    add_command(fake_site, "acme-tools", "acme", "import nothing_of_that_name")
    assert command.main(["acme"]) == 1
    assert "'acme' of acme-tools 1.0 cannot be loaded: ModuleNotFoundError" in capsys.readouterr().err


def test_command_that_two_declare(
    fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_command(fake_site, "acme-tools", "acme")
    add_command(fake_site, "other-tools", "acme")
    assert command.main(["acme"]) == 2
    assert "acme-tools (acme_tools.commands:main) and other-tools" in capsys.readouterr().err
    monkeypatch.setenv("WEIGHTWIRE_PLUGINS", "other-tools")
    discovery.refresh()
    assert command.main(["acme"]) == 0
    monkeypatch.setenv("WEIGHTWIRE_PLUGINS", "")
    discovery.refresh()
    assert command.main(["acme"]) == 2
    assert "switched off: WEIGHTWIRE_PLUGINS" in capsys.readouterr().err


def test_calls_that_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main([])
    with pytest.raises(SystemExit, match="2"):
        command.main(["plugins", "--yaml"])
    with pytest.raises(SystemExit, match="0"):
        command.main(["--version"])
    assert capsys.readouterr().out == f"weightwire {__version__}\n"


def test_the_installed_script() -> None:
    script = Path(sysconfig.get_path("scripts")) / "weightwire"
    done = subprocess.run([sys.executable, script, "plugins"], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["nccl", "weightwire-nccl", __version__, "ready"] in lines
