"""The trainer of the page on FSDP, as it stands there, into a real server."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests.conftest import Models
from plugins.vllm.tests.scene import Server

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "vllm-with-fsdp.md"


def test_the_page_s_trainer_updates_the_server(server: Server, models: Models, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    changes = {
        '"Qwen/Qwen2.5-0.5B", dtype=torch.bfloat16': f'"{models.new.folder}", dtype=torch.float32',
        "10.0.0.5": "127.0.0.1",
        "29600": str(port),
        "http://10.0.0.9:8000": server.url,
        "range(100)": "range(2)",
        "train(model)  # your step": "pass",
    }
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    code = found[1]
    for before, after in changes.items():
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    trainer = tmp_path / "trainer.py"
    trainer.write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(trainer)],
        env={**os.environ, "WEIGHTWIRE_SECRET": secrets.token_hex(16), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.greedy() == models.new.greedy()
    assert server.label() == "step-1"
