from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from weightwire.clients.protocol import ControlPlane
from weightwire.deadline import Deadline
from weightwire.errors import PeerFailed, PeerLost, TransferError, WeightwireError
from weightwire.membership import Membership
from weightwire.messages import TrainerInitInfo
from weightwire.rendezvous import Rendezvous
from weightwire.testing.pool import held_socket


class Unreachable:
    """A client whose server does not answer."""

    def get_world_size(self, include_dp: bool = True) -> int:
        raise PeerLost("the server does not answer")


class There:
    """A client of one worker."""

    def get_world_size(self, include_dp: bool = True) -> int:
        return 1


def members_of(held: socket.socket, count: int = 3) -> list[Membership]:
    common = {"num_trainer_ranks": count, "secret": "00" * 16, "master_port": held.getsockname()[1], "timeout": 30.0}
    return [
        Membership(
            TrainerInitInfo(rank=rank, listen_socket=held if rank == 0 else None, **common), None, lambda _: (0,)
        )
        for rank in range(count)
    ]


def join(members: Membership, client: Any) -> Rendezvous:
    return members.join(ControlPlane(client), Deadline(30))[0]


def test_every_trainer_rank_hears_that_the_workers_cannot_be_reached() -> None:
    first, *others = members_of(held_socket())

    def joined(members: Membership) -> WeightwireError | None:
        try:
            join(members, Unreachable()).exchange("hello", deadline=Deadline(30))
        except WeightwireError as error:
            return error
        return None

    with ThreadPoolExecutor(3) as threads:
        began = time.monotonic()
        early = threads.submit(joined, others[0])
        assert "the server does not answer" in str(joined(first))
        # This one comes when rank 0 has given up.
        late = threads.submit(joined, others[1])
        for error in (early.result(), late.result()):
            assert isinstance(error, PeerLost | PeerFailed)
            assert "the server does not answer" in str(error)
        first.close()
    assert time.monotonic() - began < 5.0


def test_who_comes_too_late_for_a_link_that_failed_is_told_why() -> None:
    first, second = members_of(held_socket(), 2)
    began = time.monotonic()
    link = join(first, There())
    link.fail(TransferError("a worker was lost"))
    first.leave(link)
    with pytest.raises(WeightwireError, match="a worker was lost"):
        join(second, None)
    # The next link is another one.
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, second, None)
        link = join(first, There())
        assert (joining.result().workers, link.absent) == (1, (2,))
        for one in (link, joining.result()):
            one.close()
    for members in (first, second):
        members.close()
    assert time.monotonic() - began < 5.0


def test_leaving_waits_a_moment_for_who_has_not_heard() -> None:
    first, second = members_of(held_socket(), 2)
    link = join(first, There())
    link.fail(TransferError("a worker was lost"))
    first.leave(link)
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(first.close)
        with pytest.raises(WeightwireError, match="a worker was lost"):
            join(second, None)
        closing.result()
    assert first.closed
