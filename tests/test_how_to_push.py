"""The commands and programs of docs/how-to/push-a-checkpoint.md, run as they stand; only the ports differ."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from weightwire import command
from weightwire.testing.fixtures import BorrowRanks, pool, ranks
from weightwire.testing.pool_rank import at_tidy
from weightwire.worker import Worker
from weightwire_server import BoundServer, create_app

__all__ = ["pool", "ranks"]

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "push-a-checkpoint.md"


def serve_worker(state: dict[str, Any]) -> str:
    server = BoundServer(create_app(Worker(nn.Linear(8, 8))))
    server.start()
    at_tidy(server.stop)
    return server.url


def run(state: dict[str, Any], directory: str, arguments: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    os.chdir(directory)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return command.main(arguments), said.getvalue()


def test_the_page(ranks: BorrowRanks, tmp_path: Path) -> None:
    user, *workers = ranks(3)
    page = PAGE.read_text()
    for port, worker in zip((8000, 8001), workers, strict=True):
        page = page.replace(f"http://127.0.0.1:{port}", worker.call(serve_worker))
    save_file(nn.Linear(8, 8).state_dict(), tmp_path / "model.safetensors")
    programs = re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.DOTALL)
    for name, text in programs:
        (tmp_path / name).write_text(text)
    lines = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("weightwire ")]
    assert len(commands) == 7
    for arguments in commands:
        result, said = user.call(run, str(tmp_path), arguments)
        assert result == 0, f"{arguments}: {said}"
    assert [name for name, _ in programs] == ["my_model.py", "push.py"]
    ended = subprocess.run(
        [sys.executable, "push.py"], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert (ended.returncode, ended.stdout.count(" committed\n")) == (0, 2), ended.stderr
