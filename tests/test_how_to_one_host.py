"""What docs/how-to/send-within-one-host.md shows is run as it stands; only the ports differ."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.test_how_to_push import run, serve_worker
from tests.test_readme import ROOT, snippets
from weightwire.testing.fixtures import BorrowRanks, pool, ranks
from weightwire_ipc import IPCTrainerInitInfo

__all__ = ["pool", "ranks"]

HOW_TO = ROOT / "docs" / "how-to" / "send-within-one-host.md"
REFERENCE = ROOT / "docs" / "reference" / "ipc.md"


def run_script(state: dict[str, Any], directory: str, name: str) -> str:
    said = io.StringIO()
    os.chdir(directory)
    with contextlib.redirect_stdout(said):
        runpy.run_path(name)
    return said.getvalue()


@pytest.mark.thorough
def test_the_page(ranks: BorrowRanks, tmp_path: Path) -> None:
    user, *workers = ranks(3)
    page = HOW_TO.read_text()
    assert snippets(HOW_TO)["worker.py"] == snippets(ROOT / "README.md")["worker.py"], "which is run by another test"
    for port, worker in zip((8000, 8001), workers, strict=True):
        page = page.replace(f"http://127.0.0.1:{port}", worker.call(serve_worker))
    shown = re.findall(r"```python\n# (trainer|adopting)\.py\n(.*?)```.*?```text\n(.*?)```", page, re.DOTALL)
    assert [name for name, _, _ in shown] == ["trainer", "adopting"]
    for name, text, expected in shown:
        (tmp_path / name).write_text(text)
        assert expected in user.call(run_script, str(tmp_path), name)
    save_file(torch.nn.Linear(8, 8).state_dict(), tmp_path / "model.safetensors")
    (command,) = re.findall(r"^weightwire (.*)$", page, re.MULTILINE)
    result, said = user.call(run, str(tmp_path), shlex.split(command))
    assert (result, "shared memory" in said) == (0, True), said


@pytest.mark.parametrize("page", [HOW_TO, REFERENCE], ids=lambda page: page.stem)
def test_init_infos_that_are_shown_can_be_made(page: Path) -> None:
    made = re.findall(r"^IPCTrainerInitInfo\(.*\)$", page.read_text(), re.MULTILINE)
    assert made
    for text in made:
        assert isinstance(eval(text), IPCTrainerInitInfo)
