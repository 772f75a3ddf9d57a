"""A pseudo-terminal of 80 columns with a program in it, and what a person would see there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import pyte

WEIGHTWIRE = str(Path(sys.executable).parent / "weightwire")
LIMIT = 40.0
# The program makes the terminal its own, so that Ctrl-C reaches it; a shell or a login does the same.
# Ctrl-C means something there, also where these tests run in the background of a shell, which ignores it.
_OWN_TERMINAL = (
    "import fcntl, os, signal, sys, termios; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """Runs a program in a terminal.

    Args:
        arguments: The program and its arguments.
        rows: Height of the terminal.
        environment: More variables.
    """

    def __init__(self, *arguments: str, rows: int = 40, environment: dict[str, str] | None = None) -> None:
        self._screen = pyte.Screen(80, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._terminal, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80, 0, 0))
        variables = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _OWN_TERMINAL, *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**variables, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        os.close(inner)

    @property
    def text(self) -> str:
        """The screen, without what is empty."""
        return "\n".join(line.rstrip() for line in self._screen.display).strip("\n")

    def press(self, text: str) -> None:
        """Press keys; `\\x03` is Ctrl-C."""
        os.write(self._terminal, text.encode())

    def until(self, sees: str | Callable[[str], bool]) -> str:
        """Read until the screen has a text, or is as a function says; returns it."""
        seen = (lambda text: sees in text) if isinstance(sees, str) else sees
        end = time.monotonic() + LIMIT
        while not seen(self.text):
            assert time.monotonic() < end, f"it did not come to that:\n{self.text}"
            assert self._read(0.1) or seen(self.text), f"the program ended:\n{self.text}"
        return self.text

    def ended(self) -> int:
        """Wait for the program to end; returns its exit status."""
        end = time.monotonic() + LIMIT
        while self._read(0.1):
            assert time.monotonic() < end, f"it did not end:\n{self.text}"
        return self._process.wait(LIMIT)

    def _read(self, seconds: float) -> bool:
        """Take in what the program writes meanwhile; whether it can still write."""
        if select.select([self._terminal], [], [], seconds)[0]:
            try:
                data = os.read(self._terminal, 65536)
            except OSError:  # the program's end is closed
                return False
            self._stream.feed(data)
            return bool(data)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(LIMIT)
        os.close(self._terminal)
