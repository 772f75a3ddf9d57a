"""Memory that weights are received into before they become the live ones."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
from collections.abc import Callable, Iterable

import torch

HUGE_PAGE = 2 << 20
"""Bytes of a huge page; storages of at least this size are placed on such pages where the machine has them."""

ALIGNMENT = 64
"""Bytes at which small storages start, as the small parameters do that travel packed."""

SLAB = 4 << 20
"""Bytes of memory at a time that storages are cut from, unless more is known to be needed."""

LARGEST_SLAB = 1 << 30
"""Bytes of such memory at most, unless one storage is larger."""

POISON = False
"""Fill staging with 0xA5 before it is handed out, so that bytes which never came cannot pass for weights. For tests."""


def allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage of `nbytes`, with undefined content; on the CPU large ones lie on huge pages.

    Raises:
        MemoryError: There is not enough.
    """
    if device.type != "cpu" or nbytes < HUGE_PAGE:
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
    pages, padding = _huge_pages(nbytes)
    return torch.frombuffer(pages, dtype=torch.uint8, offset=padding, count=nbytes).untyped_storage()


def _huge_pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Private anonymous memory, and where in it `nbytes` begin that lie on huge pages if the system has them.

    It goes back to the system with the last tensor over it. A copy into such memory runs at memcpy's speed, elsewhere
    at 0.85 of it.

    Raises:
        MemoryError: There is not enough.
    """
    try:
        pages = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes for staging: {error}") from error
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages, -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % HUGE_PAGE


class Slab:
    """CPU memory that storages are cut from, one after the other.

    Neighbours can then be written as one: thousands of small tensors by few calls, and many large ones by a single copy
    of hundreds of megabytes, which runs at the speed of memory where one of a few does not. Each is a storage of its
    own to torch. The memory goes back to the system with the last of them.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._used = self._size = 0

    def cut(self, nbytes: int, ahead: Callable[[], int] = int) -> torch.UntypedStorage:
        """The next `nbytes`, at least 1, with undefined content.

        Args:
            nbytes: How many.
            ahead: How many more will be asked for, these included; called where new memory is needed.

        Raises:
            MemoryError: There is not enough.
        """
        if self._memory is None or self._used + nbytes > self._size:
            self._size = max(SLAB, nbytes, min(ahead(), LARGEST_SLAB))
            self._memory, self._used = _huge_pages(self._size)
            self._size += self._used
        start = self._used
        self._used = _aligned(start + nbytes)
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=nbytes).untyped_storage()


def slab_bytes(sizes: Iterable[int]) -> int:
    """What storages of `sizes` take of a slab."""
    return sum(map(_aligned, sizes))


def _aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def poison(storage: torch.UntypedStorage) -> None:
    """Fill `storage` if `POISON` is set."""
    if POISON:
        storage_bytes(storage).fill_(0xA5)


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole of `storage` as a 1-D uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def view_like(tensor: torch.Tensor, storage: torch.UntypedStorage, *, offset: int | None = None) -> torch.Tensor:
    """A tensor over `storage` with dtype, shape and strides of `tensor`, at its storage offset or at `offset`."""
    start = tensor.storage_offset() if offset is None else offset
    empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return empty.set_(storage, start, tensor.size(), tensor.stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether `tensor` fills an interval of its storage: contiguous up to the order of dimensions."""
    filled = 1
    for size, step in sorted(zip(tensor.size(), tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 0:
            return True
        if size > 1 and step != filled:
            return False
        filled *= size
    return True


def copy_uncovered(source: torch.UntypedStorage, target: torch.UntypedStorage, covered: Iterable[torch.Tensor]) -> bool:
    """Copy every byte of `source` to `target`, of equal size, except where dense views `covered` of `target` lie.

    Returns:
        Whether there was any.
    """
    views = list(covered)
    if len(views) == 1 and views[0].nbytes == source.nbytes():
        return False
    reached, end, copied = 0, source.nbytes(), False
    starts = sorted((int(view.storage_offset()) * view.itemsize, view.nbytes) for view in views)
    for start, size in (*starts, (end, 0)):
        if start > reached:
            storage_bytes(target)[reached:start].copy_(storage_bytes(source)[reached:start])
            copied = True
        reached = max(reached, start + size)
    return copied


def count_users(handles: Iterable[int]) -> list[int] | None:
    """How many tensors and storage objects refer to each storage, given by `storage._cdata`.

    The count is private API of torch; where it is missing the answer is None, and held views are not noticed.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else list(map(count, handles))


def sha256(tensor: torch.Tensor) -> str:
    """SHA-256 in hex of the bytes of `tensor` in contiguous order."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    content = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b""
    return hashlib.sha256(content).hexdigest()
