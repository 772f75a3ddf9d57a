"""Handles as torch's exporter gives them, without a GPU: the bytes are made up, the fields are torch's."""

from __future__ import annotations

from typing import Any

import torch

UUID = "4e5a1f3c-9d21-4b8e-8c77-0f3b5a6d2e19"
OTHER_UUID = "11111111-2222-3333-4444-555555555555"
PID = 4711


def storage_fields(nbytes: int = 24, *, number: int = 0, pid: int = PID) -> dict[str, Any]:
    """The fields of a `StorageHandle`; another `number` is another export."""
    return {
        "handle": b"\x02c" + bytes([number % 256]) * 64,
        "nbytes": nbytes,
        "storage_offset": 512 * number,
        "ref_counter_handle": b"/torch_%d_1345610149_0" % pid,
        "ref_counter_offset": number,
        "event_handle": bytes(range(64)),
        "event_sync_required": True,
    }


def arguments(
    shape: tuple[int, ...] = (2, 3),
    dtype: torch.dtype = torch.float32,
    *,
    number: int = 0,
    nbytes: int | None = None,
    device: int = 3,
) -> tuple[Any, ...]:
    """The arguments of torch's `rebuild_cuda_tensor` for a contiguous tensor."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    size = meta.numel() * dtype.itemsize if nbytes is None else nbytes
    stored = storage_fields(size, number=number)
    handle, counter = stored["handle"], stored["ref_counter_handle"]
    tensor = (torch.Tensor, torch.Size(shape), meta.stride(), 0, torch.storage.TypedStorage, dtype, device)
    if size == 0:
        return (*tensor, None, 0, 0, False, None, 0, None, None)
    after = (counter, stored["ref_counter_offset"], stored["event_handle"], True)
    return (*tensor, handle, size, stored["storage_offset"], False, *after)
