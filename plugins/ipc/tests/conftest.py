from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightwire.testing.fixtures import pool, ranks, strict_ranks

__all__ = ["pool", "ranks", "strict_ranks"]


@pytest.fixture
def socket_directory() -> Iterator[Path]:
    """A directory for sockets, whose paths may have 107 bytes; those of `tmp_path` are longer."""
    with tempfile.TemporaryDirectory(prefix="ipc-") as directory:
        yield Path(directory)
