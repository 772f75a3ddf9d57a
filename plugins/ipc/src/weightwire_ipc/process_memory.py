"""Memory of another process, read by the system call that does that. A reference of the benchmark; imports no torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

_PROBE_SECONDS = 60.0
_PROBE = """
import ctypes, sys
from weightwire_ipc.process_memory import copy_from
try:
    copy_from(int(sys.argv[1]), int(sys.argv[2]), ctypes.addressof(ctypes.c_char()), 1)
except OSError as error:
    sys.exit(error.errno)
"""


def copy_from(pid: int, source: int, target: int, nbytes: int) -> None:
    """Copy `nbytes` from address `source` of process `pid` to address `target` of this one.

    Raises:
        OSError: The system does not let this process, or there is no such memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    vector = ctypes.c_size_t * 2
    done = 0
    while done < nbytes:
        here, there = vector(target + done, nbytes - done), vector(source + done, nbytes - done)
        read = libc.process_vm_readv(pid, here, 1, there, 1, 0)
        if read <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"process_vm_readv: {os.strerror(code)}")
        done += read


def refusal() -> str | None:
    """Why a process of this user must not read one that is not its child, in the system's words; None if it may."""
    byte = ctypes.c_char()
    arguments = [sys.executable, "-c", _PROBE, str(os.getpid()), str(ctypes.addressof(byte))]
    code = subprocess.run(arguments, timeout=_PROBE_SECONDS, check=False).returncode
    return None if code == 0 else f"{os.strerror(code)} (kernel.yama.ptrace_scope, or a seccomp filter)"
