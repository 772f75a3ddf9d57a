"""The entry point of backend `disk`; imports no torch."""

from __future__ import annotations

import importlib.util

from weightwire.hookspecs import Availability, Register, Role, TransportSpec, hookimpl


@hookimpl
def weightwire_transport() -> TransportSpec:
    """Declare backend `disk`."""
    return TransportSpec(
        backend="disk",
        api_version=(1, 0),
        wire_version=1,
        capabilities=frozenset({"full", "multi_sender", "cpu", "cuda"}),
    )


@hookimpl
def weightwire_register_worker_engines(register: Register) -> None:
    """Name the worker's engine."""
    register("disk", "weightwire_disk.engine", "DiskWeightTransferEngine")


@hookimpl
def weightwire_register_trainer_engines(register: Register) -> None:
    """Name the trainer's engine."""
    register("disk", "weightwire_disk.trainer", "DiskTrainerWeightTransferEngine")


@hookimpl
def weightwire_available(role: Role) -> Availability:
    """Trainers tell a dead trainer's leftovers by their lock, which needs POSIX; workers only read."""
    if role == "trainer" and importlib.util.find_spec("fcntl") is None:
        return Availability(False, "this system has no POSIX file locks", "train on Linux or macOS")
    return Availability(True)
