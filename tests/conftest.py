from __future__ import annotations

from pathlib import Path

import pytest

from tests.environments import build_wheels


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel of every distribution and of the template."""
    return build_wheels(tmp_path_factory.mktemp("wheels"))
