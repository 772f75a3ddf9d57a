"""What disk trainers and workers are initialised with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from weightwire import TrainerInitInfo, WeightTransferInitInfo
from weightwire.errors import MessageError


@dataclass(kw_only=True)
class DiskWeightTransferInitInfo(WeightTransferInitInfo):
    """What a worker engine is initialised with.

    Attributes:
        root: The shared directory, absolute.

    Raises:
        MessageError: A relative path, which would mean another place in every process.
    """

    root: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not Path(self.root).is_absolute():
            raise MessageError(f"root must be an absolute path, got {self.root!r}")


@dataclass
class DiskTrainerInitInfo(TrainerInitInfo):
    """What a trainer engine is initialised with.

    Attributes:
        root: The directory that trainers and workers share, under the same path; made if it is not there.
        keep: How many published updates stay.
        shard_bytes: Size of one file, unless a single parameter is larger.

    Raises:
        MessageError: No root, or numbers that are not positive.
    """

    backend: ClassVar[str] = "disk"

    root: str
    keep: int = 2
    shard_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.root or self.keep < 1 or self.shard_bytes < 1:
            raise MessageError(
                f"root must name a directory, keep and shard_bytes be positive, got {self.root!r}, {self.keep} and "
                f"{self.shard_bytes}"
            )
