from __future__ import annotations

from weightwire.testing.fixtures import pool, ranks

__all__ = ["pool", "ranks"]
