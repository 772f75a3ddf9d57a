"""Sharded trainers that speak nccl_m2n."""

from __future__ import annotations

from core.tests import sharded_fleet


class Trainers(sharded_fleet.Trainers):
    backend = "nccl_m2n"
