"""The entry point of backend `ipc`; imports no torch."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import socket

from weightwire.hookspecs import Availability, Register, Role, TransportSpec, hookimpl

_SEAL_FUTURE_WRITE = 16
_NEEDED = ((os, "memfd_create"), (os, "eventfd"), (socket, "SO_PEERCRED"))


@hookimpl
def weightwire_transport() -> TransportSpec:
    """Declare backend `ipc`."""
    return TransportSpec(
        backend="ipc",
        api_version=(1, 0),
        wire_version=1,
        capabilities=frozenset({"full", "multi_sender", "packed", "cpu", "cuda"}),
    )


@hookimpl
def weightwire_register_worker_engines(register: Register) -> None:
    """Name the worker's engine."""
    register("ipc", "weightwire_ipc.engine", "IPCWeightTransferEngine")


@hookimpl
def weightwire_register_trainer_engines(register: Register) -> None:
    """Name the trainer's engine."""
    register("ipc", "weightwire_ipc.trainer", "IPCTrainerWeightTransferEngine")


@hookimpl
def weightwire_available(role: Role) -> Availability:
    """Usable on Linux, whose memory files and peer credentials it is built on."""
    missing = [name for module, name in _NEEDED if not hasattr(module, name)]
    if missing:
        return Availability(False, f"this system has no {missing[0]}, which Linux has", "use backend 'nccl' here")
    if not _seals():
        return Availability(False, "this kernel cannot seal memory files as Linux 5.1 can", "use backend 'nccl' here")
    if importlib.util.find_spec("torch") is None:
        return Availability(False, "torch is not installed", "pip install torch")
    return Availability(True)


def _seals() -> bool:
    """Whether memory files can be sealed against being written by whoever maps them later."""
    fd = os.memfd_create("weightwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
