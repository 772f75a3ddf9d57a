"""The entry point of backend `nccl_m2n`; imports no torch."""

from __future__ import annotations

import importlib.util

from weightwire.hookspecs import Availability, Register, Role, TransportSpec, hookimpl


@hookimpl
def weightwire_transport() -> TransportSpec:
    """Declare backend `nccl_m2n`."""
    return TransportSpec(
        backend="nccl_m2n",
        aliases=("m2n",),
        api_version=(1, 0),
        wire_version=1,
        capabilities=frozenset({"full", "multi_sender", "nccl_m2n.reshard", "cpu", "cuda"}),
    )


@hookimpl
def weightwire_register_worker_engines(register: Register) -> None:
    """Name the worker's engine."""
    register("nccl_m2n", "weightwire_m2n.engine", "M2NWeightTransferEngine")


@hookimpl
def weightwire_register_trainer_engines(register: Register) -> None:
    """Name the trainer's engine."""
    register("nccl_m2n", "weightwire_m2n.trainer", "M2NTrainerWeightTransferEngine")


@hookimpl
def weightwire_available(role: Role) -> Availability:
    """Usable wherever torch is: over gloo on CPU, over NCCL on CUDA."""
    if importlib.util.find_spec("torch") is None:
        return Availability(False, "torch is not installed", "pip install torch")
    return Availability(True)
