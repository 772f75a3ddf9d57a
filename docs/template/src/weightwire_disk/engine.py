"""The worker's side: reads the published update into the sink."""

from __future__ import annotations

from pathlib import Path

from weightwire import Deadline, WeightTransferEngine, WeightTransferUpdateInfo
from weightwire.errors import TransferError, Unsupported
from weightwire_disk.messages import DiskWeightTransferInitInfo
from weightwire_disk.update import naming, read_update


class DiskWeightTransferEngine(WeightTransferEngine[DiskWeightTransferInitInfo, WeightTransferUpdateInfo]):
    """Reads each update from a folder of safetensors files."""

    init_info_cls = DiskWeightTransferInitInfo
    update_info_cls = WeightTransferUpdateInfo

    _root: Path

    def connect(self, init_info: DiskWeightTransferInitInfo, deadline: Deadline) -> None:
        """See that the directory is the trainer's.

        Raises:
            Unsupported: The trainer is not weightwire's.
            TransferError: It is another directory, or none.
        """
        if self.link is None:
            raise Unsupported("the init_info has no key 'weightwire': use weightwire's trainer", transport=self.backend)
        self._root = Path(init_info.root)
        name = self.link.gather("folder", deadline)[0]
        with naming(f"{self._root} is not the directory that trainer rank 0 uses"):
            (self._root / name).stat()

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        """Wait until the update is published, and read it into the sink.

        Raises:
            TransferError: Not initialised, or the update cannot be read.
        """
        link, deadline, number = self.link, self.deadline, update_info.round
        if link is None:
            raise self.not_initialised()
        link.rendezvous.exchange(f"written-{number}", deadline=deadline).raise_failed()
        name, digest = link.gather(f"published-{number}", deadline)[0]
        if Path(name).name != name:
            raise TransferError(f"the trainer names an update outside the directory: {name!r}", transport=self.backend)
        metadata = self.update_metadata(update_info)
        self.sink.load(read_update(self._root / name, digest, metadata, deadline))
