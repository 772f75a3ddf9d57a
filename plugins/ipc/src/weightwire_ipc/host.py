"""Which host and namespaces a process is in, and why two processes cannot share memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAMESPACES = {"net": "network", "mnt": "mount", "pid": "pid", "user": "user"}


def identity() -> dict[str, Any]:
    """What tells this process's place from another's: the boot of the kernel, namespaces, user."""
    place: dict[str, Any] = {"uid": os.getuid()}
    with contextlib.suppress(OSError):
        place["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for name in _NAMESPACES:
        with contextlib.suppress(OSError):
            place[name] = os.readlink(f"/proc/self/ns/{name}")
    return place


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """In which of `boot`, `uid` and the namespaces two places are known to differ."""
    keys = ("boot", "uid", *_NAMESPACES)
    return [key for key in keys if key in one and key in other and one[key] != other[key]]


def apart(trainer: Mapping[str, Any], worker: Mapping[str, Any], *, what: str = "share memory") -> str | None:
    """Why a trainer and a worker cannot share memory whatever the socket, and what to do; None if nothing is known."""
    different = differences(trainer, worker)
    if "boot" in different:
        return f"they run on different hosts and cannot {what}: use backend 'nccl' between hosts"
    if "uid" in different:
        return (
            f"the trainer runs as user {trainer['uid']} and the worker as user {worker['uid']}, and memory is "
            "handed to the same user only: run both as one user, or use backend 'nccl'"
        )
    return None


def apart_on_device(trainer: Mapping[str, Any], worker: Mapping[str, Any]) -> str | None:
    """Why a trainer and a worker cannot share a GPU's memory, and what to do; None if nothing is known.

    Args:
        trainer: Its `identity()`, with `gpu`: the uuid of its GPU.
        worker: Likewise; None for one that is on the CPU.
    """
    instead = "pass memory='host', or use backend 'nccl'"
    if worker.get("gpu") is None:
        return f"the trainer's weights are on GPU {trainer.get('gpu')} and the worker's model on the CPU: {instead}"
    if worker["gpu"] != trainer.get("gpu"):
        return f"the trainer is on GPU {trainer.get('gpu')} and the worker on GPU {worker['gpu']}: {instead}"
    if "pid" in differences(trainer, worker):
        return (
            f"they run in different pid namespaces, where CUDA IPC does not work: share one (--pid=...), or {instead}"
        )
    return None


def unreachable(trainer: Mapping[str, Any], worker: Mapping[str, Any], *, directory: str | None) -> str:
    """Why a worker does not reach a trainer's socket, and what to do."""
    different = differences(trainer, worker)
    if directory is not None:
        where = "in another mount namespace" if "mnt" in different else "without a view of that directory"
        return f"the worker runs {where}: mount {directory} in both containers, or use backend 'nccl'"
    if "net" in different:
        return (
            "they run in different network namespaces (two containers, say), whose sockets do not meet: run both in "
            "one (--network=container:..., one pod), or give socket_directory=... in a directory that both mount"
        )
    spaces = [_NAMESPACES[name] for name in different if name in _NAMESPACES]
    return f"nobody listens there{f' ({spaces[0]} namespaces differ)' if spaces else ''}: has the trainer ended?"
