"""What a stock vLLM server is told in one update message, and how parameters are cut into messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightwire.errors import MetadataError
from weightwire.layout import ParamMeta, dtype_name
from weightwire_ipc.handles import HandleArguments
from weightwire_ipc.pickled import encode_handles


def cut_chunks(metadata: Sequence[ParamMeta], limit: int) -> list[list[int]]:
    """Cut parameters into fills of a buffer, as vLLM does: without padding, before one that would overflow it.

    Args:
        metadata: The parameters, in order.
        limit: Size of the buffer in bytes.

    Returns:
        The places of each fill's parameters.

    Raises:
        MetadataError: A parameter is larger than the buffer.
    """
    chunks: list[list[int]] = []
    filled = limit
    for place, meta in enumerate(metadata):
        if meta.nbytes > limit:
            raise MetadataError(
                f"parameter {meta.name!r} has {meta.nbytes} bytes and the packed buffer {limit}: pass "
                f"packed_buffer_size_bytes={meta.nbytes} or more, or packed=False",
                transport="ipc",
                parameter=meta.name,
            )
        if not chunks or filled + meta.nbytes > limit:
            chunks.append([])
            filled = 0
        chunks[-1].append(place)
        filled += meta.nbytes
    return chunks


def speaks_json(client: object) -> bool:
    """Whether a client's messages travel as JSON, in which a handle has no place; so do all of a fan-out to one."""
    return hasattr(client, "base_url") or any(map(speaks_json, getattr(client, "clients", ())))


def merge_handles(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, tuple[Any, ...]]]:
    """For each parameter the handles of all ranks' GPUs, as torch takes them.

    Args:
        ranks: By rank, by parameter: `HandleArguments.to_json` by GPU uuid.

    Raises:
        MessageError: A handle that cannot be.
    """
    return [
        {uuid: HandleArguments.from_json(one).arguments() for part in parts for uuid, one in part.items()}
        for parts in zip(*ranks, strict=True)
    ]


def stock_update(
    metadata: Sequence[ParamMeta], handles: list[dict[str, tuple[Any, ...]]], *, packed: bool, pickled: bool
) -> dict[str, Any]:
    """The message, with the keys of vLLM's IPC update.

    Args:
        metadata: The parameters it brings.
        handles: By parameter the handles of all GPUs; packed, one element for all parameters.
        packed: Whether they lie in one buffer, end to end.
        pickled: Whether the message travels as JSON, in which vLLM pickles handles.
    """
    update: dict[str, Any] = {
        "names": [meta.name for meta in metadata],
        "dtype_names": [dtype_name(meta.dtype) for meta in metadata],
        "shapes": [list(meta.shape) for meta in metadata],
    }
    if packed:
        update["tensor_sizes"] = [meta.nbytes for meta in metadata]
    sent = handles[0] if packed else handles
    return update | ({"ipc_handles_pickled": encode_handles(sent)} if pickled else {"ipc_handles": sent})
