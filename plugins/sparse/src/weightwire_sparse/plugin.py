"""The entry point of backend `sparse_nccl`; imports no torch."""

from __future__ import annotations

import importlib.util

from weightwire.hookspecs import Availability, Register, Role, TransportSpec, hookimpl


@hookimpl
def weightwire_transport() -> TransportSpec:
    """Declare backend `sparse_nccl`."""
    return TransportSpec(
        backend="sparse_nccl",
        aliases=("sparse",),
        api_version=(1, 0),
        wire_version=1,
        capabilities=frozenset({"full", "multi_sender", "sparse_nccl.patches", "cpu", "cuda"}),
    )


@hookimpl
def weightwire_register_worker_engines(register: Register) -> None:
    """Name the worker's engine."""
    register("sparse_nccl", "weightwire_sparse.engine", "SparseNCCLWeightTransferEngine")


@hookimpl
def weightwire_register_trainer_engines(register: Register) -> None:
    """Name the trainer's engine."""
    register("sparse_nccl", "weightwire_sparse.trainer", "SparseNCCLTrainerWeightTransferEngine")


@hookimpl
def weightwire_available(role: Role) -> Availability:
    """Usable wherever torch and numpy are: over gloo on CPU, over NCCL on CUDA."""
    for module in ("torch", "numpy"):
        if importlib.util.find_spec(module) is None:
            return Availability(False, f"{module} is not installed", f"pip install {module}")
    return Availability(True)
