"""A process that ends while its communicators have not: `python exiting.py STORE STORE`.

It says "leaving" on standard output in the middle of the interpreter's teardown and stays there for a second.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import torch
from torch._C._distributed_c10d import FileStore

from weightwire.collective import TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.errors import PeerStalled

SIZE = 32 << 20
PIECE = 4 << 20
EXIT_CODE = 7


class Teardown:
    """Its end is somewhere in the middle of the interpreter's, when modules are half gone."""

    def __init__(self) -> None:
        self.write, self.sleep = os.write, time.sleep

    def __del__(self) -> None:
        self.write(1, b"leaving\n")
        self.sleep(1.0)


def connect(store: str, stall_limit: float) -> TorchCommunicator:
    """To rank 1, which stops in mid-message."""
    return TorchCommunicator(
        FileStore(store, 2),
        rank=0,
        world_size=2,
        labels=["rank 0", "rank 1"],
        device="cpu",
        deadline=Deadline(90),
        stall_limit=stall_limit,
        piece_bytes=PIECE,
    )


def main(first: str, second: str) -> int:
    """Retire one communicator; forget the other, while a daemon thread waits for it."""
    torch.set_num_threads(1)
    retired, forgotten = connect(first, 1.0), connect(second, 60.0)
    deadline = Deadline(60)
    message = torch.ones(SIZE, dtype=torch.uint8)
    waited_for = forgotten.send([message], [1], deadline=deadline)
    try:
        retired.send([message], [1], deadline=deadline).wait(deadline)
    except PeerStalled:
        retired.retire()
    threading.Thread(target=waited_for.wait, args=(deadline,), daemon=True).start()
    sys.modules["teardown"] = Teardown()  # type: ignore[assignment]
    return EXIT_CODE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
