"""Wheels of everything, and fresh environments to install them into; nothing is downloaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "docs" / "template"
_BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def build_wheels(folder: Path) -> Path:
    """Build a wheel of every distribution and of the template into `folder`, from copies: a checkout stays as it is."""
    sources = [ROOT / "core", *sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml")), TEMPLATE]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda source: _build(source, folder), sources))
    return folder


def _build(source: Path, folder: Path) -> None:
    copy = folder / "sources" / source.name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "tests"))
    run([sys.executable, "-c", _BUILD, folder], cwd=copy)


class Environment:
    """A virtual environment that sees what is installed in this one, except everything of weightwire's."""

    def __init__(self, folder: Path) -> None:
        made = SimpleNamespace(context=None)

        class Builder(venv.EnvBuilder):
            def post_setup(self, context: SimpleNamespace) -> None:
                made.context = context

        Builder().create(folder)
        self.python = Path(made.context.env_exe)
        self.scripts = self.python.parent
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
        borrowed = folder / "borrowed"
        borrowed.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            # Path files are of this environment, and what is editable is reached through them.
            if "weightwire" not in entry.name and not entry.name.endswith(".pth"):
                (borrowed / entry.name).symlink_to(entry)
        (self.site / "borrowed.pth").write_text(f"{borrowed}\n")

    def install(self, wheels: Path, *names: str) -> None:
        """Install by name from `wheels`, with what the wheels require, without an index."""
        options = ("--no-index", "--find-links", wheels, "--no-compile", "--quiet", "--disable-pip-version-check")
        self.run("-m", "pip", "install", *options, *names)

    def installed(self) -> set[str]:
        """Distributions that were installed into it."""
        return {
            re.sub(r"[-_.]+", "-", folder.name.partition("-")[0]).lower() for folder in self.site.glob("*.dist-info")
        }

    def run(self, *arguments: str | Path, status: int = 0, cwd: Path | None = None, timeout: float = 50.0) -> str:
        """Run its interpreter; returns what was printed."""
        return run([self.python, *arguments], status=status, cwd=cwd, timeout=timeout)

    def transports(self) -> dict[str, str]:
        """Backend names, aliases too, and states, by `weightwire plugins --json`."""
        found = json.loads(self.run(self.scripts / "weightwire", "plugins", "--json"))
        return {name: one["state"] for one in found["transports"] for name in (one["name"], *one["aliases"])}


def run(command: Sequence[str | Path], *, status: int = 0, cwd: Path | None = None, timeout: float = 50.0) -> str:
    """Run a command outside the checkout, with nothing of this environment's in the way; returns its output."""
    outside = ("PYTHON", "PIP_", "WEIGHTWIRE_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(outside)}
    environment |= {"OMP_NUM_THREADS": "1", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd or "/",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == status, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout
