"""One update on disk: safetensors files, and a manifest with the checksum of every parameter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weightwire import Deadline, ParamMeta
from weightwire.errors import TransferError
from weightwire.source import as_bytes

MANIFEST = "manifest.json"

Records = dict[str, dict[str, Any]]
"""Parameter name to its file, dtype, shape and checksum."""

_NATIVE = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""Dtypes that every safetensors reader knows; the others are stored as their bytes."""


@contextmanager
def naming(what: str, parameter: str | None = None) -> Iterator[None]:
    """Turn an error of the file system into a `TransferError` that says what was being done to which file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        words = f"{what}: {error}. See that all ranks reach the same directory and that it has room"
        raise TransferError(words, transport="disk", parameter=parameter) from error


def cut(pairs: Iterable[tuple[ParamMeta, Tensor]], limit: int) -> Iterator[list[tuple[ParamMeta, Tensor]]]:
    """Group parameters, in order, into files of at most `limit` bytes; a larger one gets a file of its own."""
    shard: list[tuple[ParamMeta, Tensor]] = []
    size = 0
    for meta, tensor in pairs:
        if shard and size + meta.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append((meta, tensor))
        size += meta.nbytes
    if shard:
        yield shard


def write_shard(file: Path, shard: Sequence[tuple[ParamMeta, Tensor]], deadline: Deadline) -> Records:
    """Write one file and return what the manifest has to say of it.

    Raises:
        TransferError: The file cannot be written.
    """
    records: Records = {}
    stored: dict[str, Tensor] = {}
    memory: set[int] = set()
    for meta, tensor in shard:
        deadline.check(f"writing {meta.name!r}")
        plain = tensor.cpu()
        # Parameters may share memory; safetensors refuses to store them so.
        if (address := plain.untyped_storage().data_ptr()) in memory:
            plain = plain.clone()
        memory.add(address)
        stored[meta.name] = plain if meta.dtype in _NATIVE else as_bytes(plain)
        record = {"file": file.name, "sha256": _sha256(plain)}
        records[meta.name] = record | {key: meta.to_json()[key] for key in ("dtype", "shape")}
    with naming(f"cannot write {file}", shard[0][0].name):
        save_file(stored, file)
        file.chmod(0o444)
    return records


def write_manifest(folder: Path, records: Mapping[str, Any], revision: Mapping[str, Any]) -> str:
    """Write the manifest and return its SHA-256, by which the workers know it.

    Raises:
        TransferError: It cannot be written.
    """
    content = json.dumps({"format": 1, "revision": dict(revision), "parameters": dict(records)}).encode()
    with naming(f"cannot write {folder / MANIFEST}"):
        (folder / MANIFEST).write_bytes(content)
        (folder / MANIFEST).chmod(0o444)
    return hashlib.sha256(content).hexdigest()


def read_update(
    folder: Path, digest: str, metadata: Sequence[ParamMeta], deadline: Deadline
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a published update, each read when it is asked for and checked before it is given out.

    Args:
        folder: The update.
        digest: What `write_manifest` returned.
        metadata: What is expected, in order.
        deadline: Looked at before each parameter.

    Raises:
        TransferError: A file is missing, or its bytes are not those that were written; the parameter is named.
    """
    with naming(f"cannot read {folder / MANIFEST}"):
        content = (folder / MANIFEST).read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise TransferError(f"{folder / MANIFEST} is not the one that the trainer wrote", transport="disk")
    records = json.loads(content)["parameters"]
    # The files are closed also when an error, and with it this frame, is kept by somebody.
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for meta in metadata:
            deadline.check(f"reading {meta.name!r}")
            name = records[meta.name]["file"]
            with naming(f"cannot read {folder / name}", meta.name):
                if name not in files:
                    files[name] = stack.enter_context(safe_open(folder / name, framework="pt"))
                tensor = files[name].get_tensor(meta.name)
            if _sha256(tensor) != records[meta.name]["sha256"]:
                words = f"the bytes of {meta.name!r} in {folder / name} changed since they were written"
                raise TransferError(words, transport="disk", parameter=meta.name)
            # Bytes lie anywhere in a file, and a view of another dtype has to be aligned.
            yield meta.name, tensor if meta.dtype in _NATIVE else tensor.clone().view(meta.dtype).reshape(meta.shape)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor).numpy().data).hexdigest()
