"""docs/template as a third party has it: a wheel, in an environment of its own; and the page that explains it."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

import weightwire
from tests.environments import ROOT, TEMPLATE, Environment

PAGE = ROOT / "docs" / "how-to" / "write-a-transport.md"
SHOWN = re.compile(r"`(?P<file>[\w./-]+)`:\n\n```\w+\n(?P<text>.*?)```\n", re.DOTALL)
"""A file that the page shows: its path in the template, then its text."""


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The template from its wheel, over core from its wheel."""
    environment = Environment(tmp_path_factory.mktemp("template") / "environment")
    environment.install(wheels, "weightwire-disk")
    assert environment.installed() == {"weightwire", "weightwire-disk"}
    return environment


def run_tests(environment: Environment, folder: Path, file: str, *, timeout: float = 50.0) -> None:
    """Run one of the template's test files, from a copy that has no sources beside it."""
    shutil.copy(TEMPLATE / "pyproject.toml", folder)
    shutil.copytree(TEMPLATE / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    said = environment.run("-m", "pytest", "-q", f"tests/{file}", cwd=folder, timeout=timeout)
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said


@pytest.mark.thorough
def test_it_is_found(installed: Environment) -> None:
    assert installed.transports() == {"disk": "ready"}


@pytest.mark.thorough
def test_its_own_tests_pass(installed: Environment, tmp_path: Path) -> None:
    run_tests(installed, tmp_path, "test_disk.py")


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_it_conforms(installed: Environment, tmp_path: Path) -> None:
    run_tests(installed, tmp_path, "test_conformance.py", timeout=280.0)


@pytest.mark.thorough
def test_the_page_is_followed(installed: Environment, tmp_path: Path) -> None:
    page = PAGE.read_text()
    for line in re.findall(r"^weightwire (.*)$", page, re.MULTILINE):
        assert "disk" in installed.run(installed.scripts / "weightwire", *line.split())
    (program,) = re.findall(r"```python\n# try_it.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "try_it.py").write_text(program)
    assert installed.run(tmp_path / "try_it.py").startswith("2 parameters over safetensors in ")


def test_it_goes_with_this_core() -> None:
    project = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["project"]
    major, minor, _ = weightwire.__version__.split(".")
    assert project["version"] == weightwire.__version__
    assert f"weightwire~={major}.{minor}" in project["dependencies"]
    assert (TEMPLATE / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_page_shows_exactly_the_files() -> None:
    shown = {found["file"]: found["text"] for found in SHOWN.finditer(PAGE.read_text())}
    files = [file.relative_to(TEMPLATE) for file in TEMPLATE.rglob("*") if file.suffix in (".py", ".toml")]
    assert sorted(shown) == sorted(str(file) for file in files if file.name != "test_disk.py")
    for name, text in shown.items():
        assert text == (TEMPLATE / name).read_text(), f"{PAGE.name} shows another {name}: python -m tests.test_template"


def show_the_files() -> None:
    """Put the files as they are into the page."""

    def renewed(found: re.Match[str]) -> str:
        begin, end = (place - found.start() for place in found.span("text"))
        return found.group()[:begin] + (TEMPLATE / found["file"]).read_text() + found.group()[end:]

    PAGE.write_text(SHOWN.sub(renewed, PAGE.read_text()))


if __name__ == "__main__":
    show_the_files()
