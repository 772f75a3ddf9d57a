"""Checksums of weights as `/weight_checker` names them: `dp0:pp0:pcp0:tp0:<parameter>`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def keyed(checksums: Mapping[str, str], parallel_config: Any) -> dict[str, str]:
    """Put this rank's place before each name, so that the ranks of a server can be told apart.

    Args:
        checksums: SHA-256 in hex by parameter name.
        parallel_config: Where this rank stands; tensor-parallel ranks are counted first.
    """
    place = place_of(parallel_config)
    return {f"{place}:{name}": value for name, value in checksums.items()}


def place_of(parallel_config: Any) -> str:
    """A rank's place in words: `dp0:pp0:pcp0:tp0`."""
    pipeline, tensor = divmod(parallel_config.rank, parallel_config.tensor_parallel_size)
    return f"dp{parallel_config.data_parallel_index}:pp{pipeline}:pcp0:tp{tensor}"


def mismatches(found: Mapping[str, str], baseline: Mapping[str, str]) -> list[str]:
    """Keys that differ or that only one side has, sorted."""
    return sorted(key for key in found.keys() | baseline.keys() if found.get(key) != baseline.get(key))
