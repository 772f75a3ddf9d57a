"""Sharded trainers that speak sparse_nccl."""

from __future__ import annotations

from core.tests import sharded_fleet


class Trainers(sharded_fleet.Trainers):
    backend = "sparse_nccl"
