from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weightwire.clients.protocol import ControlPlane
from weightwire.deadline import Deadline
from weightwire.errors import PeerFailed, PeerLost
from weightwire.membership import Membership
from weightwire.messages import TrainerInitInfo
from weightwire.testing.pool import held_socket


class Unreachable:
    """A client whose server does not answer."""

    def get_world_size(self, include_dp: bool = True) -> int:
        raise PeerLost("the server does not answer")


def test_every_trainer_rank_hears_that_the_workers_cannot_be_reached() -> None:
    held = held_socket()
    common = {"num_trainer_ranks": 3, "secret": "00" * 16, "master_port": held.getsockname()[1], "timeout": 30.0}

    def join(rank: int) -> BaseException | None:
        info = TrainerInitInfo(rank=rank, listen_socket=held if rank == 0 else None, **common)
        members = Membership(info, None, lambda trainers: (0,))
        client: Any = Unreachable()
        try:
            link, _ = members.join(ControlPlane(client), Deadline(30))
            link.exchange("hello", deadline=Deadline(30))
        except (PeerLost, PeerFailed) as error:
            return error
        finally:
            members.close()
        return None

    with ThreadPoolExecutor(3) as threads:
        began = time.monotonic()
        first, *others = threads.map(join, range(3))
    assert time.monotonic() - began < 5.0
    assert isinstance(first, PeerLost)
    for error in others:
        assert isinstance(error, PeerLost | PeerFailed)
        assert "the server does not answer" in str(error)
