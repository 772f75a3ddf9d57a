"""Who takes part in a trainer's links, and how its ranks come together."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from weightwire.clients.protocol import ControlPlane
from weightwire.deadline import Deadline
from weightwire.errors import MetadataError, describe
from weightwire.fleet import Fleet, listening_socket, shared_secret, trainer_count, worker_count
from weightwire.messages import TrainerInitInfo
from weightwire.rendezvous import Rendezvous
from weightwire.source import WeightSource

_RETRY_SECONDS = 0.05
_TELL_SECONDS = 5.0


class Membership:
    """One trainer rank's place in all links of its engine. Rank 0 holds one listening socket for all of them.

    Args:
        info: What the engine was made with.
        source: The weights, if there is a source of them.
        senders_of: Says which trainer ranks send what the source declares, of so many.

    Attributes:
        trainers: How many trainer ranks there are.
        senders: Those that send.
        epoch: Number of the present link.
        secret: What every member of a link has to prove, 16 bytes.

    Raises:
        MessageError: World size, ranks or secret do not add up.
        MetadataError: The source's device mesh names ranks that there are not.
    """

    def __init__(
        self, info: TrainerInitInfo, source: WeightSource | None, senders_of: Callable[[int], tuple[int, ...]]
    ) -> None:
        self._info = info
        self.trainers = trainer_count(info)
        self.senders = senders_of(self.trainers)
        self.epoch = -1
        self.secret = shared_secret(info, trainers=self.trainers)
        mesh_ranks = getattr(source, "mesh_ranks", None)
        beyond = sorted(rank for rank in (mesh_ranks() if callable(mesh_ranks) else ()) if rank >= self.trainers)
        if beyond:
            raise MetadataError(
                f"the source's device mesh names rank {beyond[0]}, and there are {self.trainers} trainer ranks: "
                "the default process group's ranks must be the trainer ranks"
            )
        self._listener: socket.socket | None = None
        self._refusing: Rendezvous | None = None
        if info.rank == 0:
            self._listener = listening_socket(info, trainers=self.trainers)

    @property
    def closed(self) -> bool:
        """Whether rank 0 has given up its socket."""
        return self._info.rank == 0 and self._listener is None

    def address(self) -> dict[str, Any]:
        """What a worker needs to join, for rank 0 to send."""
        assert self._listener is not None
        return {
            "epoch": self.epoch,
            "secret": self.secret.hex(),
            "address": self._info.master_address,
            "port": self._listener.getsockname()[1],
            "senders": list(self.senders),
            "trainers": self.trainers,
        }

    def join(self, control: ControlPlane, deadline: Deadline) -> tuple[Rendezvous, Fleet]:
        """Begin the next epoch: rank 0 hosts it for the workers behind `control`, the other ranks join.

        Raises:
            MessageError: There are other workers than the world size says.
            PeerLost, DeadlineExceeded: Rank 0 or a server did not answer.
        """
        self.epoch += 1
        info = self._info
        if info.rank != 0:
            rendezvous = Rendezvous.join(
                address=info.master_address,
                port=info.master_port,
                rank=info.rank,
                secret=self.secret,
                epoch=self.epoch,
                deadline=deadline,
                host_comes=True,
            )
            return rendezvous, Fleet(self.trainers, self.senders, rendezvous.workers)
        self._refuse_no_more()
        try:
            workers = worker_count(info, len(self.senders), control.world_size())
        except Exception as error:
            # There will be no link; the other ranks, which wait for it, have to hear that.
            rendezvous = self._host(0)
            rendezvous.fail(describe(error))
            self.leave(rendezvous)
            raise
        return self._host(workers), Fleet(self.trainers, self.senders, workers)

    def _host(self, workers: int) -> Rendezvous:
        assert self._listener is not None
        return Rendezvous.host(
            address=self._info.master_address,
            listen_socket=self._listener.dup(),
            trainers=self.trainers,
            workers=workers,
            secret=self.secret,
            epoch=self.epoch,
            peer_timeout=self._info.peer_timeout,
        )

    def leave(self, rendezvous: Rendezvous) -> None:
        """Leave a link; a rank that comes too late for one that failed is told why, until the next link or `close`."""
        if self._lacks_trainers(rendezvous) and rendezvous.failure is not None:
            self._refusing = rendezvous
        else:
            rendezvous.close()

    def _lacks_trainers(self, rendezvous: Rendezvous) -> bool:
        return any(rank < self.trainers for rank in rendezvous.absent)

    def _refuse_no_more(self) -> None:
        if self._refusing is not None:
            self._refusing.close()
            self._refusing = None

    def close(self) -> None:
        """Give up the socket; idempotent. Ranks that have yet to hear of a failure get a moment to come."""
        until = time.monotonic() + _TELL_SECONDS
        while self._refusing is not None and self._lacks_trainers(self._refusing) and time.monotonic() < until:
            time.sleep(_RETRY_SECONDS)
        self._refuse_no_more()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
