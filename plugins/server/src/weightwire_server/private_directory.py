"""Where a front and its ranks meet: a directory that only this user enters, with sockets and a secret in it."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final, Self

from weightwire.errors import Unauthorized

DIRECTORY_VARIABLE: Final = "WEIGHTWIRE_FRONT"
"""Set for the ranks that a front starts: the directory's path."""


class PrivateDirectory:
    """Paths inside the directory, and the secret of this boot.

    Args:
        path: The directory. It need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.front = path / "front"
        """Socket on which the front takes ranks."""
        self._secret = path / "secret"

    @classmethod
    def fresh(cls) -> Self:
        """One under a name that nobody else has."""
        made = cls(Path(tempfile.mkdtemp(prefix="weightwire-")))
        made.create()
        return made

    @classmethod
    def of_launcher(cls, environment: os._Environ[str] | dict[str, str]) -> Self:
        """The one that all ranks of a launcher (torchrun) derive from its variables; rank 0 creates it."""
        run = f"{environment.get('TORCHELASTIC_RUN_ID', 'none')}-{environment.get('MASTER_PORT', '0')}"
        name = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in run)
        return cls(Path(tempfile.gettempdir()) / f"weightwire-{os.getuid()}-{name}")

    def create(self) -> None:
        """Make the directory, empty and with a new secret; what an earlier boot left goes.

        Raises:
            Unauthorized: Something of that name is there that others may enter.
        """
        self.path.mkdir(mode=0o700, exist_ok=True)
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise Unauthorized(f"{self.path} is not a directory of this user alone: remove it")
        for left in self.path.iterdir():
            left.unlink()
        descriptor = os.open(self._secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(16))

    def remove(self) -> None:
        """Remove the directory; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)

    def secret(self) -> str:
        """The secret that ranks and front prove to each other.

        Raises:
            OSError: The front has not made it yet.
        """
        return self._secret.read_text()

    def rank(self, rank: int) -> Path:
        """Socket on which a rank takes the front's calls."""
        return self.path / f"rank-{rank}"
