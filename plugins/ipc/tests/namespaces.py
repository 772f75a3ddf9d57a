"""Other namespaces and users for tests, where the system lets us have them."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess

import pytest

CLONE_NEWNS = 0x20000


@functools.cache
def _permitted(flags: tuple[str, ...]) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", *flags, "true"], capture_output=True, timeout=10, check=False).returncode == 0


def require_unshare(*flags: str) -> list[str]:
    """The command that runs another one in namespaces of its own; skips the test where that is not permitted."""
    if not _permitted(flags):
        pytest.skip(f"unshare {' '.join(flags)} is not permitted here")
    return ["unshare", *flags]


def require_root() -> None:
    """Skip the test where this process cannot become another user."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")


def leave_namespace(flags: int) -> None:
    """Give the calling thread, which should end soon, namespaces of its own; nothing mounted there is seen outside."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if flags & CLONE_NEWNS:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
