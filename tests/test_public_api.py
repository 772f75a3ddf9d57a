"""Every public name is in public_api.txt, so that none appears or disappears unnoticed.

After a change that is meant: `./dev run python tests/test_public_api.py`, and look at the difference.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("public_api.txt")
PACKAGES = sorted(file.parent.name for file in ROOT.glob("plugins/*/src/*/__init__.py"))
MODULES = ["weightwire", "weightwire.errors", "weightwire.hookspecs", "weightwire.testing", *PACKAGES]


def public(names: object) -> list[str]:
    assert isinstance(names, list | set | dict)
    return sorted(name for name in names if not name.startswith("_"))


def exported(module: ModuleType) -> dict[str, object]:
    """What a module offers: `__all__`, else what it defines or fetches lazily from its own package."""
    own = module.__name__.partition(".")[0]
    values = {name: getattr(module, name) for name in public(set(getattr(module, "__all__", dir(module))))}
    if hasattr(module, "__all__"):
        return values
    return {
        name: value
        for name, value in values.items()
        if not inspect.ismodule(value) and getattr(value, "__module__", own).partition(".")[0] == own
    }


def members(cls: type, listed: set[object]) -> set[str]:
    """Public members of a class, those of bases that have lines of their own left out."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("weightwire") and (base is cls or base not in listed):
            found |= {*vars(base), *vars(base).get("__annotations__", ())}
            if dataclasses.is_dataclass(base):
                found |= {field.name for field in dataclasses.fields(base)}
    return set(public(found))


def lines() -> Iterator[str]:
    offered = {name: exported(importlib.import_module(name)) for name in MODULES}
    listed: set[object] = {value for values in offered.values() for value in values.values() if isinstance(value, type)}
    told: set[object] = set()
    for module, values in offered.items():
        for name, value in values.items():
            yield f"{module}.{name}"
            if isinstance(value, type) and value.__module__.startswith("weightwire") and value not in told:
                told.add(value)
                yield from (f"{module}.{name}.{member}" for member in sorted(members(value, listed)))
    for file in [ROOT / "core" / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]:
        project = tomllib.loads(file.read_text())["project"]
        groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
        for group, points in groups.items():
            yield from (f"{project['name']} [{group}] {name}" for name in sorted(points))


def test_public_names_are_those_of_the_list() -> None:
    known, found = LIST.read_text().splitlines(), list(lines())
    new = sorted(set(found) - set(known))
    gone = sorted(set(known) - set(found))
    assert (new, gone) == ([], []), "if this is meant: ./dev run python tests/test_public_api.py"
    assert known == found


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in lines()))
