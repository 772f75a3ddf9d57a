"""For every distribution's tests: hypothesis profiles, and what is skipped: `cuda`, `vllm` where absent, `thorough`."""

from __future__ import annotations

import os
import zlib
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

from core.tests.fake_site import fake_site as fake_site

_quiet = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=_quiet)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None, print_blob=True)
settings.register_profile("thorough", settings.get_profile("dev"), max_examples=2000)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run the tests marked thorough too")
    parser.addoption("--share", type=_share, metavar="I/N", help="run the I-th of N shares of all tests, as CI does")


def _share(text: str) -> tuple[int, int]:
    share, shares = map(int, text.split("/"))
    if not 1 <= share <= shares:
        raise ValueError
    return share, shares


def _together(item: pytest.Item) -> str:
    """What tests have in common that fall to the same share; those of vLLM's that are in one file share servers."""
    return item.path.name if item.get_closest_marker("vllm") else item.nodeid


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (chosen := config.getoption("--share")) is not None:
        share, shares = chosen
        falls = {item: zlib.crc32(_together(item).encode()) % shares == share - 1 for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not falls[item]])
        items[:] = [item for item in items if falls[item]]
    if not config.getoption("--thorough"):
        for item in items:
            if item.get_closest_marker("thorough"):
                item.add_marker(pytest.mark.skip(reason="takes long: ./dev test --thorough"))
    if find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="needs vLLM: ./dev test --vllm"))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))
