"""What README and the tutorial show is run as it stands; only the port differs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "tutorial" / "first-transfer.md"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def snippets(page: Path) -> dict[str, str]:
    """The page's Python blocks that name their file in the first line."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return {block.split("\n", 1)[0].removeprefix("# "): block for block in blocks if block.startswith("# ")}


@contextmanager
def serving(script: Path) -> Iterator[str]:
    """Run a worker script; yields the URL it says it serves at."""
    with subprocess.Popen(
        [sys.executable, script], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    ) as process:
        try:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said += line
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    yield found.group()
                    break
            else:
                pytest.fail(f"{script.name} ended without serving: {said}")
        finally:
            process.terminate()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=() if page.stem == "README" else pytest.mark.thorough) for page in PAGES],
)
def test_worker_and_trainer(page: Path, tmp_path: Path) -> None:
    found = snippets(page)
    worker = tmp_path / "worker.py"
    worker.write_text(found["worker.py"].replace("port=8000", "port=0"))
    with serving(worker) as url:
        trainer = tmp_path / "trainer.py"
        trainer.write_text(found["trainer.py"].replace("http://127.0.0.1:8000", url))
        run = subprocess.run(
            [sys.executable, trainer], capture_output=True, text=True, env=ENVIRONMENT, timeout=50, check=False
        )
        assert run.returncode == 0, run.stderr
        assert "2 parameters" in run.stdout


def test_the_other_snippets(tmp_path: Path) -> None:
    others = {
        name: code for page in PAGES for name, code in snippets(page).items() if name not in ("worker.py", "trainer.py")
    }
    assert list(others) == ["handler.py"]
    for name, code in others.items():
        (tmp_path / name).write_text(code)
        run = subprocess.run(
            [sys.executable, tmp_path / name], capture_output=True, text=True, env=ENVIRONMENT, timeout=50, check=False
        )
        assert run.returncode == 0, run.stderr


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
