from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from importlib_metadata import distribution, packages_distributions

import weightwire
from weightwire.requirements import normalized

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(path.parent for path in [ROOT / "core/pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")])


def project(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return table


PROJECTS = {project(folder)["name"]: folder for folder in FOLDERS}


def named(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


def test_core_has_exactly_four_requirements() -> None:
    required = [line for line in distribution("weightwire").requires or () if "extra ==" not in line]
    assert sorted(map(named, required)) == ["httpx", "importlib-metadata", "pluggy", "torch"]


@pytest.mark.parametrize("name", PROJECTS)
def test_versions_are_in_lock_step(name: str) -> None:
    assert project(PROJECTS[name])["version"] == weightwire.__version__
    assert distribution(name).version == weightwire.__version__, "run ./dev to install again"


@pytest.mark.parametrize("name", sorted(set(PROJECTS) - {"weightwire"}))
def test_plugins_need_this_core(name: str) -> None:
    major, minor, _ = weightwire.__version__.split(".")
    required = project(PROJECTS[name])["dependencies"]
    assert f"weightwire~={major}.{minor}" in required
    assert not {named(line) for line in required} & (set(PROJECTS) - {"weightwire"})


def test_extras_are_names_for_distributions() -> None:
    extras = project(ROOT / "core")["optional-dependencies"]
    del extras["testing"]
    plugins = {name.removeprefix("weightwire-"): name for name in PROJECTS if name != "weightwire"}
    assert {extra: named(lines[0]) for extra, lines in extras.items() if extra != "all"} == plugins
    assert sorted(map(named, extras["all"])) == sorted(plugins.values())


def imported(files: Iterable[Path]) -> set[str]:
    """What files import, by full names, for type checkers too."""
    found: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("name", PROJECTS)
def test_what_is_imported_is_required(name: str) -> None:
    table = project(PROJECTS[name])
    extras = table.get("optional-dependencies", {})
    if name == "weightwire":  # the others are names for distributions
        extras = {"testing": extras["testing"]}
    required = {normalized(named(line)) for line in itertools.chain(table["dependencies"], *extras.values())} | {name}
    lent = set((ROOT / "core/src/weightwire/resharding").rglob("*.py"))
    names = imported(set((PROJECTS[name] / "src").rglob("*.py")) - lent)
    if any(full.startswith("weightwire.resharding") for full in names):
        names |= imported(lent)  # core does not require what this needs: whoever uses it does
    homes = packages_distributions()
    undeclared = {
        module
        for module in {full.partition(".")[0] for full in names} - set(sys.stdlib_module_names)
        if not {normalized(home) for home in homes.get(module, [module])} & required
    }
    assert not undeclared


@pytest.mark.parametrize("name", PROJECTS)
def test_what_a_distribution_carries(name: str) -> None:
    folder = PROJECTS[name]
    package = folder / "src" / name.replace("-", "_")
    assert (package / "py.typed").is_file()
    assert (folder / "README.md").is_file()
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_import_contracts_hold() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "lint-imports"
    done = subprocess.run([sys.executable, linter], cwd=ROOT, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stdout + done.stderr
