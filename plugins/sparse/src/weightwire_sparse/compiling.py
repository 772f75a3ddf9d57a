"""Machine code by numba; imported only where that was chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


def compiled(kernel: _Kernel, *signature: Any) -> _Kernel:
    """`kernel` as machine code, kept on disk for later processes where there is a place for it.

    Args:
        kernel: Runs without the interpreter's lock.
        signature: The types that it is compiled for at once; without one it is for those that come, when they do.
    """
    machine_code: _Kernel
    try:
        machine_code = numba.njit(*signature, nogil=True, cache=True)(kernel)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        machine_code = numba.njit(*signature, nogil=True)(kernel)
    return machine_code
