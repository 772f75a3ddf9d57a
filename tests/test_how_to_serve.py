"""What docs/how-to/serve-behind-your-own-app.md shows is run as it stands; only the port differs."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import torch

from weightwire_server import BoundServer

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "serve-behind-your-own-app.md"


def written(name: str, folder: Path, **replaced: str) -> Path:
    """The page's block that begins with its file's name, as a file."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code: str = next(block for block in blocks if block.startswith(f"# {name}\n"))
    for old, new in replaced.items():
        assert old in code
        code = code.replace(old, new)
    file = folder / name
    file.write_text(code)
    return file


def snippet(name: str, folder: Path, **replaced: str) -> ModuleType:
    """Such a file, run as a module."""
    file = written(name, folder, **replaced)
    spec = importlib.util.spec_from_file_location(f"how_to_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_an_app_and_its_trainer(tmp_path: Path) -> None:
    app = snippet("app.py", tmp_path)
    with BoundServer(app.app) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.get("/weights/weight_info").status_code == 401
        numbers = {"numbers": [1.0, 2, 3, 4, 5, 6, 7, 8]}
        assert client.post("/generate", json=numbers).json()["answer"] != 36.0
        snippet("trainer.py", tmp_path, **{"http://127.0.0.1:8000": server.url})
        assert client.post("/generate", json=numbers).json() == {"answer": 36.0}
        app.worker.pause("wait")
        refused = client.post("/generate", json=numbers)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    app.worker.shutdown()


def test_an_answer_that_ends_early(tmp_path: Path) -> None:
    module = snippet("cancelled.py", tmp_path)

    async def read() -> int:
        count = 0
        async for _ in module.steps(torch.zeros(8)):
            count += 1
            if count == 3:
                operator.start()
                while not module.worker.is_paused:
                    await asyncio.sleep(0)
        return count

    operator = threading.Thread(target=module.worker.pause, args=("abort",))
    assert asyncio.run(read()) == 3
    operator.join(20.0)
    assert not operator.is_alive()


def test_ending_with_the_app(tmp_path: Path) -> None:
    module = snippet("lifespan.py", tmp_path)
    with BoundServer(module.app) as server:
        assert httpx.get(f"{server.url}/health", trust_env=False).is_success


def test_fastapi(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    module = snippet("fastapi_app.py", tmp_path)
    with BoundServer(module.app) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.get("/version").json() == {"version": "default"}
        assert client.get("/weight_info").json()["state"] == "uninitialised"


@pytest.mark.thorough
def test_several_ranks(tmp_path: Path) -> None:
    file = written("ranks.py", tmp_path, **{"port=8000": "port=0"})
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, file], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line + process.stderr.read()
            answer = httpx.post(f"{found.group()}/generate", trust_env=False)
            assert answer.json() == {"answer": [0, 1]}
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30.0) == 0
