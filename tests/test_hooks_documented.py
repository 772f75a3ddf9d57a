"""A hook without a test of its own, or without a place in the reference, is not one that anybody can rely on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weightwire.hookspecs import TransportHooks

ROOT = Path(__file__).parents[1]
HOOKS = [name for name in vars(TransportHooks) if not name.startswith("_")]


def headings(page: str) -> list[str]:
    return re.findall(r"^### `(\w+)\(", (ROOT / page).read_text(), re.MULTILINE)


def test_hooks_are_prefixed() -> None:
    assert HOOKS
    assert all(name.startswith("weightwire_") for name in HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_has_a_test(hook: str) -> None:
    tests = (ROOT / "core" / "tests" / "test_loading_hooks.py").read_text()
    assert f"def test_{hook}(" in tests, f"core/tests/test_loading_hooks.py has no test_{hook}"


def test_the_reference_has_each_hook_and_no_other() -> None:
    assert headings("docs/reference/plugins.md") == HOOKS


@pytest.mark.parametrize("hook", HOOKS)
def test_the_template_answers_it(hook: str) -> None:
    assert f"def {hook}(" in (ROOT / "docs/template/src/weightwire_disk/plugin.py").read_text()


def test_every_state_and_variable_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/plugins.md").read_text()
    source = (ROOT / "core/src/weightwire/discovery.py").read_text()
    for state in ("found", "disabled", "conflict", "incompatible", "broken", "unavailable", "ready"):
        assert f"\n| {state} |" in page
    for variable in {*re.findall(r"WEIGHTWIRE_[A-Z]+", source), "WEIGHTWIRE_STRICT"}:
        assert f"\n| `{variable}` |" in page
