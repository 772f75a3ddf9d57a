"""The commands as a person at a terminal sees them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.cli.tests.scene import held, info, read, release, run, serve_worker, write
from plugins.cli.tests.terminal import WEIGHTWIRE, Terminal
from weightwire.testing.fixtures import BorrowRanks

CTRL_C = "\x03"


def test_a_push_that_is_interrupted_and_one_that_is_not(ranks: BorrowRanks, tmp_path: Path) -> None:
    (worker,) = ranks(1)
    url = worker.call(serve_worker)
    before = worker.call(held)
    path = str(write(tmp_path / "a.safetensors"))
    worker.call(read)
    with Terminal(WEIGHTWIRE, "push", path, "--to", url) as terminal:
        shown = terminal.until("finish ")
        assert "6 of 6 parameters" in shown
        assert len(shown.splitlines()) == 1
        assert "GiB/s" in shown
        assert "2.367 KiB of 2.367 KiB" in shown
        terminal.press(CTRL_C)
        assert terminal.ended() == 130
        words = "".join(terminal.text.splitlines())
        assert "weightwire push: interrupted, and the update aborted: 1 of 1 servers are on their old weights" in words
        assert "Traceback" not in terminal.text
    worker.call(release)
    assert worker.call(held) == before
    with Terminal(WEIGHTWIRE, "push", path, "--to", url, "--label", "step-7", "--verify") as terminal:
        assert terminal.ended() == 0
        lines = terminal.text.splitlines()
    assert lines[0].startswith("6 parameters, 2.367 KiB, full update, ")
    assert url in lines
    assert " label     default -> step-7" in lines
    assert lines[-1] == f"equal  {url}"
    assert worker.call(info)["weight_version"] == "step-7"


def test_status_watches(ranks: BorrowRanks, tmp_path: Path) -> None:
    worker, command = ranks(2)
    url = worker.call(serve_worker)
    path = str(write(tmp_path / "a.safetensors"))
    with Terminal(WEIGHTWIRE, "status", url, "http://127.0.0.1:9", "--watch", "--interval", "0.1") as terminal:
        terminal.until(lambda text: "uninitialised" in text and "unreachable" in text and "default" in text)
        assert command.call(run, "push", path, "--to", url, "--label", "step-8")[0] == 0
        terminal.until("step-8")
        worker.kill()
        terminal.until(lambda text: text.count("unreachable") == 2)
        terminal.press(CTRL_C)
        assert terminal.ended() == 130
        assert "Traceback" not in terminal.text


def test_help_imports_no_torch() -> None:
    script = """
import sys
from weightwire.command import main
for command in ("push", "verify", "status", "completion"):
    assert main([command, "--help"]) == 0
    assert main([command, "--wrong"]) == 2
assert "torch" not in sys.modules
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "--dry-run" in ended.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes() -> None:
    path = f"{Path(WEIGHTWIRE).parent}:/usr/bin:/bin"
    with Terminal("bash", "--norc", "--noprofile", "-i", environment={"PATH": path, "PS1": "$ "}) as terminal:
        terminal.until("$")
        terminal.press('eval "$(weightwire completion bash)"; echo rea""dy\n')
        terminal.until("ready")
        terminal.press("weightwire pus\t")
        terminal.until("weightwire push")
        terminal.press("--dry\t")
        terminal.until("weightwire push --dry-run")
        terminal.press("--policy b\t")
        terminal.until("--policy best-effort")
        terminal.press("\x15weightwire stat\t")
        terminal.until("weightwire status")
        terminal.press("\x15exit\n")
        assert terminal.ended() == 0


@pytest.mark.parametrize(("shell", "words"), [("zsh", "#compdef weightwire"), ("fish", "complete -c weightwire")])
def test_other_shells(shell: str, words: str) -> None:
    ended = subprocess.run([WEIGHTWIRE, "completion", shell], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0
    assert words in ended.stdout
    checker = shutil.which(shell)
    if checker is not None:
        subprocess.run([checker, "-n", "-c", ended.stdout], check=True, timeout=20)
