"""What a checkpoint holds against what the ranks of a worker server hold, by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from weightwire.layout import dtype_name
from weightwire.source import WeightSource
from weightwire.source_check import checked
from weightwire.staging import sha256
from weightwire_cli.servers import Stored

Kind = Literal["missing", "extra", "differs", "not comparable"]


@dataclass(frozen=True, slots=True)
class Digest:
    """One tensor of a checkpoint.

    Attributes:
        sha256: Of its bytes in contiguous order, in hex: what a worker's checksum of it is too.
        dtype: Name of its dtype.
        shape: Its shape.
    """

    sha256: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """A parameter that is not the same in checkpoint and worker.

    Attributes:
        place: The rank, `"dp0:pp0:pcp0:tp0"`, or the replica, `"dp0"`, where no rank has it.
        name: The parameter.
        kind: What is the matter.
        why: In words.
    """

    place: str
    name: str
    kind: Kind
    why: str


def digests_of(source: WeightSource) -> dict[str, Digest]:
    """The digests of all tensors of a source, by name.

    Raises:
        SourceMismatch: The source is not what it declared.
    """
    return {
        meta.name: Digest(sha256(tensor), dtype_name(meta.dtype), meta.shape)
        for meta, tensor in checked(source.iter_full(), source.metadata)
    }


def compare(
    digests: Mapping[str, Digest],
    held: Mapping[str, Mapping[str, str]],
    parameters: Mapping[str, Mapping[str, Stored]] | None,
    *,
    partial: bool,
) -> list[Finding]:
    """Compare a checkpoint with all ranks of one server.

    Args:
        digests: Of the checkpoint, by name.
        held: What the ranks hold: place -> name -> SHA-256.
        parameters: Their dtypes and shapes, where the server tells.
        partial: The checkpoint is only a part, so that workers may hold more.

    Returns:
        What is not the same; equal parameters are left out.
    """
    replicas: dict[str, dict[str, Mapping[str, str]]] = {}
    for place, sums in held.items():
        replicas.setdefault(place.partition(":")[0], {})[place] = sums
    findings: list[Finding] = []
    for replica, ranks in replicas.items():
        findings += _Replica(digests, ranks, parameters or {}).compare(replica, partial=partial)
    return findings


class _Replica:
    """The ranks of one data-parallel replica: between them they hold every parameter, whole or in pieces."""

    def __init__(
        self,
        digests: Mapping[str, Digest],
        ranks: Mapping[str, Mapping[str, str]],
        parameters: Mapping[str, Mapping[str, Stored]],
    ) -> None:
        self._digests = digests
        self._ranks = ranks
        self._stored = {place: parameters.get(place, {}) for place in ranks}
        self._first = {
            alias: name
            for records in self._stored.values()
            for name, record in records.items()
            for alias in (*record.names, name)
        }

    def compare(self, replica: str, *, partial: bool) -> Iterable[Finding]:
        known = {self._first.get(name, name) for name in self._digests}
        names = {name for sums in self._ranks.values() for name in sums}
        # Tied tensors that a checkpoint holds twice; a worker has them under one name.
        tied = {one.sha256 for name, one in self._digests.items() if name in names and len(one.shape) > 1}
        for name, digest in self._digests.items():
            here = self._first.get(name, name)
            holders = {place: sums[here] for place, sums in self._ranks.items() if here in sums}
            if holders:
                yield from self._held(name, here, digest, holders)
            elif digest.sha256 not in tied:
                yield Finding(replica, name, "missing", "no rank has it")
        if partial:
            return
        for place, sums in self._ranks.items():
            for name in sums:
                if name not in known:
                    yield Finding(place, name, "extra", "the checkpoint does not have it")

    def _held(self, name: str, here: str, digest: Digest, holders: Mapping[str, str]) -> Iterable[Finding]:
        for place, value in holders.items():
            if value == digest.sha256:
                continue
            stored = self._stored[place].get(here)
            if stored is not None and stored.dtype != digest.dtype:
                yield Finding(place, name, "not comparable", f"{stored.dtype} there, {digest.dtype} in the checkpoint")
            elif stored is not None and stored.local_shape != digest.shape:
                why = f"shape {stored.local_shape} there, {digest.shape} in the checkpoint"
                yield Finding(place, name, "not comparable", why)
            elif stored is None and len(set(holders.values())) > 1 and digest.sha256 not in holders.values():
                why = "its ranks hold different bytes: each may have a shard"
                yield Finding(place, name, "not comparable", why)
            else:
                yield Finding(place, name, "differs", "other bytes")
