"""The trainer's side: every rank writes what it owns first, rank 0 publishes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from weightwire import Deadline, ParamMeta, TrainerWeightTransferEngine
from weightwire.report import ProgressEvent
from weightwire_disk.directory import LinkFolder
from weightwire_disk.messages import DiskTrainerInitInfo
from weightwire_disk.update import Records, cut, naming, write_manifest, write_shard


class DiskTrainerWeightTransferEngine(TrainerWeightTransferEngine[DiskTrainerInitInfo]):
    """Writes each update as a folder of safetensors files."""

    init_info_cls = DiskTrainerInitInfo
    consumes = "full"

    _own: LinkFolder | None = None
    """Rank 0's: where updates grow."""
    _folder: Path

    @property
    def _root(self) -> Path:
        return Path(self.init_info.root).absolute()

    def worker_init_info(self) -> dict[str, Any]:
        """Where the workers find the updates."""
        return {"root": str(self._root)}

    @property
    def path(self) -> str:
        """The way the bytes take, for the report."""
        return f"safetensors in {self._root}, {len(self.fleet.senders)} writing, {self.fleet.workers} reading"

    def connect(self, deadline: Deadline) -> None:
        """Make a folder for this link, and have every rank look for it: the directory has to be the same one."""
        assert self.rendezvous is not None
        if self.rank == 0:
            with naming(f"cannot use {self._root}"):
                self._own = LinkFolder(self._root)
        name = self._own.path.name if self._own is not None else None
        outcome = self.rendezvous.exchange("folder", deadline=deadline, payload=name, gather=True)
        outcome.raise_failed()
        self._folder = self._root / outcome.payloads[0]
        with naming(f"{self._root} is not the directory that trainer rank 0 uses"):
            self._folder.stat()

    def transmit(self, number: int, deadline: Deadline) -> int:
        """Write this rank's parameters; when all ranks have, rank 0 publishes the update and tells the workers."""
        assert self.rendezvous is not None
        folder = self._folder / f"round-{number}"
        with naming(f"cannot make {folder}"):
            folder.mkdir(exist_ok=True)
        records: Records = {}
        sent = 0
        for place, shard in enumerate(cut(self._first_owned(), self.init_info.shard_bytes)):
            records |= write_shard(folder / f"{self.rank}-{place:05d}.safetensors", shard, deadline)
            sent += sum(meta.nbytes for meta, _ in shard)
            self._tell(len(records), sent)
        written = self.rendezvous.exchange(
            f"written-{number}", deadline=deadline, payload=records, gather=self.rank == 0
        )
        written.raise_failed()
        update = self._publish(folder, written.payloads) if self._own is not None else None
        self.rendezvous.exchange(f"published-{number}", deadline=deadline, payload=update).raise_failed()
        return sent

    def _first_owned(self) -> Iterator[tuple[ParamMeta, Tensor]]:
        for meta, tensor in self.pairs():
            if meta.first_owner == self.rank:
                yield meta, tensor

    def _publish(self, folder: Path, written: dict[int, Records | None]) -> list[str]:
        assert self._own is not None
        records = {name: record for part in written.values() for name, record in (part or {}).items()}
        digest = write_manifest(folder, records, self.next_revision.to_json())
        with naming(f"cannot publish {folder} in {self._root}"):
            published = self._own.publish(folder)
            self._own.prune(self.init_info.keep)
        return [published.name, digest]

    def _tell(self, count: int, sent: int) -> None:
        if self.on_progress is not None:
            self.on_progress(
                ProgressEvent(
                    phase="transfer",
                    parameters_done=count,
                    parameters=len(self.metadata),
                    bytes_done=sent,
                    bytes=self.total_bytes,
                )
            )

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Remove what was not published."""
        own, self._own = self._own, None
        if own is not None:
            own.close()
