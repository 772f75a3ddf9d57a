from __future__ import annotations

from weightwire.testing.fixtures import pool, ranks, strict_ranks

__all__ = ["pool", "ranks", "strict_ranks"]
