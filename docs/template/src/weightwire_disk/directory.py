"""The shared directory: where an update grows, how it is published, what is removed.

An update grows in a folder of its trainer's link, which nobody looks into, and is published by a rename: whoever sees
`update-00000007` sees all of it. A link's folder is locked while its trainer lives, so that the next trainer can tell
what a dead one left behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp

_PUBLISHED = "update-"
_LINK = ".link-"


class LinkFolder:
    """A trainer's own folder in the shared directory, until `close`.

    Args:
        root: The shared directory.

    Raises:
        OSError: It cannot be made or written.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        # Locked before it gets the name that others sweep: there is no moment in which it looks abandoned.
        made = Path(mkdtemp(prefix=".new-", dir=root))
        self._lock = os.open(made, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(root / made.name.replace(".new-", _LINK))
        self._root = root

    def publish(self, folder: Path) -> Path:
        """Give a finished update the next version number and its place in the shared directory, at once."""
        while True:
            versions = published(self._root)
            number = int(versions[-1].name.removeprefix(_PUBLISHED)) + 1 if versions else 1
            try:
                return folder.rename(self._root / f"{_PUBLISHED}{number:08d}")
            except OSError as error:
                # Another trainer took the number: the next one is free.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def prune(self, keep: int) -> None:
        """Remove all but the `keep` newest updates."""
        for old in published(self._root)[:-keep]:
            # Out of sight first, at once: nobody meets half of an update.
            shutil.rmtree(old.rename(self.path / old.name))

    def close(self) -> None:
        """Remove the folder; idempotent."""
        # Another trainer rank may still be writing here; what it leaves, the next trainer sweeps.
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def published(root: Path) -> list[Path]:
    """The updates in the shared directory, oldest first."""
    return sorted(folder for folder in root.glob(f"{_PUBLISHED}*") if folder.name[len(_PUBLISHED) :].isdigit())


def _sweep(root: Path) -> None:
    """Remove the folders of links whose trainers are gone."""
    for folder in root.glob(f"{_LINK}*"):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
