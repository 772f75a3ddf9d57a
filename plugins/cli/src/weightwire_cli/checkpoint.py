"""A checkpoint in safetensors as a source of weights: lazy, mapped, checked before anything is sent."""

from __future__ import annotations

import json
import mmap
import os
import stat
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from weightwire.errors import MetadataError, SourceMismatch
from weightwire.layout import ParamMeta, check_metadata, dtype_from_name
from weightwire.source import WeightSource
from weightwire_cli.safetensors_header import StoredTensor, read_header

_SINGLE: Final = "model.safetensors"
_INDEX: Final = ".safetensors.index.json"
_AHEAD_BYTES: Final = 64 << 20
_STEP_BYTES: Final = 1 << 20
"""The kernel reads no more than about this much ahead for one request."""
_LARGEST_INDEX: Final = 100_000_000


class SafetensorsSource(WeightSource):
    """Sends the tensors of a `.safetensors` file, of a sharded checkpoint, or of a Hugging Face model folder.

    Files are mapped privately, so that what is in the page cache is sent from where it is, without a copy, and memory
    beyond the page cache does not grow with the checkpoint. While one tensor travels the kernel is asked for the next
    ones (`MADV_WILLNEED`: it reads from disk by itself, which takes no thread of ours).

    Headers are checked when this is made. A file that is replaced (renamed over) afterwards is read as it was; one
    that is written to fails the transfer with `SourceMismatch`; one that is cut short under the mapping can kill the
    process (SIGBUS), as any mapped file: write checkpoints beside and rename them.

    Args:
        path: A `.safetensors` file, an index (`*.safetensors.index.json`), or a folder that has `model.safetensors`,
            an index, or a single `.safetensors` file.
        device: Where each tensor is put when its turn comes; a transport that takes CUDA tensors alone needs it.

    Raises:
        MetadataError: No such device, or a file is missing, truncated or lying; file and tensor are named.
    """

    def __init__(self, path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> None:
        self.path = Path(path)
        try:
            self.device = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:  # torch says it either way
            raise MetadataError(f"there is no device {str(device)!r} here: {error}") from error
        self._tensors = tuple(_tensors(self.path))
        if not self._tensors:
            raise MetadataError(f"{self.path} holds no tensors")

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """One entry for each tensor, in the order of the bytes, so that files are read front to back."""
        found = [ParamMeta(one.name, dtype_from_name(one.dtype), one.shape) for _, one in self._tensors]
        check_metadata(found)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.stop - one.start for _, one in self._tensors)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor as a view of its mapped file.

        Raises:
            SourceMismatch: A file was written to since it was opened.
        """
        asked, ahead = 0, 0
        for place, (shard, stored) in enumerate(self._tensors):
            while asked < len(self._tensors) and (asked <= place + 1 or ahead < _AHEAD_BYTES):
                coming, what = self._tensors[asked]
                coming.will_need(what)
                ahead += what.stop - what.start
                asked += 1
            ahead -= stored.stop - stored.start
            yield stored.name, shard.tensor(stored).to(self.device)


class _Shard:
    """One open file; its descriptor is closed with the last reference."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._map: mmap.mmap | None = None
        try:
            # O_NONBLOCK: opening a pipe would wait for a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            self._found = os.fstat(self._descriptor)
            if not stat.S_ISREG(self._found.st_mode):
                raise MetadataError(f"{path} is no file")
            self.tensors = read_header(self._descriptor, path=self.path)
        except OSError as error:
            raise MetadataError(f"{path} cannot be read: {error.strerror}") from error

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """The tensor where it lies; a copy only where its bytes are not aligned for its dtype."""
        self._check_unchanged(stored)
        dtype = dtype_from_name(stored.dtype)
        if stored.start == stored.stop:
            return torch.empty(stored.shape, dtype=dtype)
        count = stored.stop - stored.start
        raw = torch.frombuffer(self._mapped(stored), dtype=torch.uint8, offset=stored.start, count=count)
        if stored.start % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(stored.shape)

    def will_need(self, stored: StoredTensor) -> None:
        """Have the kernel begin to read the tensor's bytes, if they are not in memory."""
        self._check_unchanged(stored)
        mapped = self._mapped(stored)
        first = stored.start // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError):  # advice that is not taken changes nothing but the time
            for start in range(first, stored.stop, _STEP_BYTES):
                if not self._is_cached(start):
                    mapped.madvise(mmap.MADV_WILLNEED, start, min(_STEP_BYTES, stored.stop - start))

    def _is_cached(self, offset: int) -> bool:
        """Whether the byte there is in the page cache; advice on what is costs the kernel a look at every page."""
        try:
            return os.preadv(self._descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:  # it would have to wait, or the file system does not say
            return False

    def _mapped(self, stored: StoredTensor) -> mmap.mmap:
        if self._map is None:
            try:
                # Private and writable: torch warns of memory that is not, and nobody writes.
                self._map = mmap.mmap(self._descriptor, self._found.st_size, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise SourceMismatch(f"{self.path} cannot be mapped: {error}", parameter=stored.name) from error
        return self._map

    def _check_unchanged(self, stored: StoredTensor) -> None:
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self._found.st_size, self._found.st_mtime_ns):
            words = f"{self.path} was written to while it was being read; tensor {stored.name!r} may be neither"
            raise SourceMismatch(f"{words} old nor new: write beside and rename", parameter=stored.name)


def _tensors(path: Path) -> Iterator[tuple[_Shard, StoredTensor]]:
    found = _located(path)
    if not found.name.endswith(_INDEX):
        shard = _Shard(found)
        yield from ((shard, stored) for stored in shard.tensors)
        return
    weight_map = _weight_map(found)
    for name, file in weight_map.items():
        if not (found.parent / file).exists():
            raise MetadataError(f"{found} places {name!r} in {file}, which is not there", parameter=name)
    for file in sorted(set(weight_map.values())):
        shard = _Shard(found.parent / file)
        named = {name for name, where in weight_map.items() if where == file}
        held = {stored.name for stored in shard.tensors}
        if absent := sorted(named - held):
            raise MetadataError(f"{found} says that {absent[0]!r} is in {file}, which lacks it", parameter=absent[0])
        if unnamed := sorted(held - named):
            raise MetadataError(
                f"{shard.path} holds {unnamed[0]!r}, which {found} does not place there: one of them is of another "
                "checkpoint",
                parameter=unnamed[0],
            )
        yield from ((shard, stored) for stored in shard.tensors)


def _located(path: Path) -> Path:
    """The file or index that `path` means."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return path
        if (path / _SINGLE).exists():
            return path / _SINGLE
        files = sorted(path.iterdir())
    except OSError as error:
        raise MetadataError(f"{path} cannot be read: {error.strerror}") from error
    indexes = [file for file in files if file.name.endswith(_INDEX)]
    singles = [file for file in files if file.name.endswith(".safetensors")]
    candidates = indexes or singles
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(file.name for file in candidates[:4])
        raise MetadataError(f"{path} has several checkpoints ({names}) and no index: name the file")
    pickled = [file.name for file in files if file.suffix in (".bin", ".pt", ".pth")]
    hint = f"; {pickled[0]} is pickled, which is not read: save it as safetensors" if pickled else ""
    raise MetadataError(f"{path} holds no safetensors checkpoint{hint}")


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        if index.stat().st_size > _LARGEST_INDEX:
            raise MetadataError(f"{index} is too large to be an index")
        record: Any = json.loads(index.read_bytes())
    except OSError as error:
        raise MetadataError(f"{index} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, MetadataError):
            raise
        raise MetadataError(f"{index} is not JSON: {error}") from error
    weight_map = record.get("weight_map") if isinstance(record, dict) else None
    if not isinstance(weight_map, dict):
        raise MetadataError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise MetadataError(f"{index} places {name!r} in {file!r}, which is no file beside it", parameter=name)
    return weight_map
