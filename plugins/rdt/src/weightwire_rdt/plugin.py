"""The entry point of backend `sharded_rdt`; imports neither torch nor Ray."""

from __future__ import annotations

import importlib.util

from weightwire.hookspecs import Availability, Register, Role, TransportSpec, hookimpl


@hookimpl
def weightwire_transport() -> TransportSpec:
    """Declare backend `sharded_rdt`."""
    return TransportSpec(
        backend="sharded_rdt",
        aliases=("rdt",),
        api_version=(1, 0),
        wire_version=1,
        capabilities=frozenset({"full", "multi_sender", "packed", "cpu", "cuda"}),
    )


@hookimpl
def weightwire_register_worker_engines(register: Register) -> None:
    """Name the worker's engine."""
    register("sharded_rdt", "weightwire_rdt.engine", "ShardedRDTWeightTransferEngine")


@hookimpl
def weightwire_register_trainer_engines(register: Register) -> None:
    """Name the trainer's engine."""
    register("sharded_rdt", "weightwire_rdt.trainer", "ShardedRDTTrainerWeightTransferEngine")


@hookimpl
def weightwire_available(role: Role) -> Availability:
    """Usable wherever torch, numpy and Ray are; NIXL makes it fast."""
    for module in ("torch", "numpy", "ray"):
        if importlib.util.find_spec(module) is None:
            return Availability(False, f"{module} is not installed", f"pip install {module}")
    return Availability(True)
