"""Sharded trainers that speak sharded_rdt."""

from __future__ import annotations

from core.tests import sharded_fleet


class Trainers(sharded_fleet.Trainers):
    backend = "sharded_rdt"
