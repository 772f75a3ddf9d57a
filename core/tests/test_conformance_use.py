"""The kit as others use it: through pytest's plugin, and through `weightwire check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.tests.broken_transports import register
from core.tests.fake_site import FakeSite
from weightwire import command
from weightwire.testing import TransportUnderTest
from weightwire.testing.conformance.catalogue import CHECKS
from weightwire.testing.conformance.command import run

pytest_plugins = ["pytester"]


def run_pytest(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    words = [sys.executable, "-m", "pytest", "-p", "weightwire_pytest", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=50, check=False)


def test_the_plugin_imports_nothing_until_it_is_used(tmp_path: Path) -> None:
    text = "import sys\ndef test_it():\n    assert not {'torch', 'weightwire'} & set(sys.modules)\n"
    ended = run_pytest(tmp_path, text)
    assert ended.returncode == 0, ended.stdout


def test_the_kit_itself_needs_no_pytest() -> None:
    text = "import sys, weightwire.testing as kit; early = 'torch' in sys.modules; kit.TransportUnderTest\n"
    text += "import weightwire.testing.conformance.command; sys.exit(early or 'pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], timeout=50, check=False).returncode == 0


THIRD_PARTY = """
import pytest
from weightwire.testing import TransportConformance, TransportUnderTest

class TestTheirs(TransportConformance):
    @pytest.fixture
    def transport(self):
        return TransportUnderTest("nccl")

class TestForgetful(TransportConformance):
    pass

def test_ranks(weightwire_strict_ranks):
    assert len({rank.pid for rank in weightwire_strict_ranks(2)}) == 2
"""


def test_a_subclass_and_one_fixture_are_a_whole_test_file(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(THIRD_PARTY)
    only = "(Theirs and (1-to-3 or tiny or other-senders)) or (Forgetful and classes) or test_ranks"
    ended = pytester.runpytest_inprocess("-p", "weightwire_pytest", "-p", "no:hypothesispytest", "-k", only)
    ended.assert_outcomes(passed=3, skipped=2, errors=1, deselected=len(CHECKS) * 2 - 5)
    words = ended.stdout.str()
    assert "1 x expensive: --weightwire-all runs it" in words
    assert "1 x transport 'nccl' declares capability 'multi_sender'" in words
    assert "TestForgetful needs a fixture `transport`" in words


def test_check_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "nccl", "--group", "contract", "--option", "stall_limit=1.5"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:3] == ["contract", "declares-itself", "ok"]
    assert lines[-1] == ["nccl", "conforms:", "8", "ok,", "0", "failed,", "0", "skipped"]
    assert command.main(["check", "nccl", "--group", "contract", "--json"]) == 0
    assert {one["outcome"] for one in json.loads(capsys.readouterr().out)} == {"ok"}


def test_check_goes_on_after_a_failure_and_says_what_it_was(tmp_path: Path) -> None:
    subject = TransportUnderTest("stale_buffer", options={"root": str(tmp_path)}, register=register)
    names = ("declares-itself", "sent-again", "classes")
    results = list(run([check for check in CHECKS if check.name in names], subject))
    assert [result.outcome for result in results] == ["skipped", "ok", "failed"]
    assert "there is no plugin to look at" in results[0].words
    assert "update 1: stale" in results[2].words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonesuch"], "Invalid weight transfer backend: nonesuch"),
        (["whole"], "has to be told its root: pass --option root=VALUE"),
        (["whole", "--option", "root"], "--option takes KEY=VALUE, got 'root'"),
        (["whole", "--option", "root=/x", "--option", "rot=/x"], "has no field 'rot'"),
        (["whole", "--option", "root=/x", "--option", "keep=0"], "keep"),
        (["whole", "--option", "root=/x", "--option", "keep=many"], "keep must be int, got str"),
    ],
)
def test_check_called_wrongly(
    arguments: list[str], words: str, fake_site: FakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    register()
    assert command.main(["check", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_check_is_known_to_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "hold a transport against the conformance kit" in capsys.readouterr().out
