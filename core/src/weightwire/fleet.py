"""Who takes part in a transfer: trainer ranks, the senders among them, and workers."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weightwire.errors import MessageError, MetadataError
from weightwire.layout import ParamMeta
from weightwire.messages import TrainerInitInfo

SECRET_VARIABLE = "WEIGHTWIRE_SECRET"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The ranks of one link.

    Attributes:
        trainers: Number of trainer ranks.
        senders: Trainer ranks that send tensor bytes: the distinct first owners, in order of rank.
        workers: Number of worker ranks.
    """

    trainers: int
    senders: tuple[int, ...]
    workers: int

    @property
    def world_size(self) -> int:
        """Ranks of the data plane: senders first, then workers."""
        return len(self.senders) + self.workers

    @property
    def rank_offset(self) -> int:
        """Data-plane rank of the first worker."""
        return len(self.senders)

    @property
    def receivers(self) -> range:
        """Data-plane ranks of the workers."""
        return range(self.rank_offset, self.world_size)

    def labels(self) -> list[str]:
        """The data-plane ranks in words."""
        return [f"trainer rank {rank}" for rank in self.senders] + [
            f"worker rank {rank}" for rank in range(self.workers)
        ]


def senders_of(metadata: Sequence[ParamMeta], *, trainers: int) -> tuple[int, ...]:
    """The trainer ranks that send where each parameter is sent by its first owner.

    Raises:
        MetadataError: A parameter is owned by a rank that does not exist.
    """
    _check_owners(metadata, trainers)
    return tuple(sorted({meta.first_owner for meta in metadata})) or (0,)


def owners_of(metadata: Sequence[ParamMeta], *, trainers: int) -> tuple[int, ...]:
    """The trainer ranks that send where every owner of a parameter may: all that hold anything.

    Raises:
        MetadataError: A parameter is owned by a rank that does not exist.
    """
    _check_owners(metadata, trainers)
    everywhere = range(trainers)
    return tuple(sorted({rank for meta in metadata for rank in meta.owners or everywhere})) or (0,)


def _check_owners(metadata: Sequence[ParamMeta], trainers: int) -> None:
    for meta in metadata:
        beyond = [rank for rank in meta.owners or () if rank >= trainers]
        if beyond:
            raise MetadataError(
                f"parameter {meta.name!r} is owned by trainer rank {beyond[0]}, and there are {trainers} trainer "
                "ranks: pass num_trainer_ranks",
                parameter=meta.name,
            )


def trainer_count(info: TrainerInitInfo) -> int:
    """How many trainer ranks there are: as given, else the size of the default process group, else one.

    Raises:
        MessageError: This rank is outside that number.
    """
    count = info.num_trainer_ranks
    if count is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        count = torch.distributed.get_world_size() if distributed else 1
    if info.rank >= count:
        raise MessageError(f"rank {info.rank} is outside {count} trainer ranks: pass num_trainer_ranks")
    return count


def shared_secret(info: TrainerInitInfo, *, trainers: int) -> bytes:
    """The 16 bytes that every rank of the fleet proves.

    Raises:
        MessageError: Several trainer ranks and no common secret, or one that is not 16 bytes in hex.
    """
    given = info.secret or os.environ.get(SECRET_VARIABLE)
    if given is None:
        if trainers > 1:
            raise MessageError(
                f"{trainers} trainer ranks need a common secret: give every rank the same secret=... (16 bytes in "
                f"hex) or the same {SECRET_VARIABLE} in its environment"
            )
        return secrets.token_bytes(16)
    try:
        secret = bytes.fromhex(given)
    except ValueError:
        secret = b""
    if len(secret) != 16:
        raise MessageError(
            "secret must be 16 bytes in hex, e.g. from `python -c 'import secrets; print(secrets.token_hex(16))'`"
        )
    return secret


def worker_count(info: TrainerInitInfo, senders: int, known: int | None) -> int:
    """How many worker ranks there are.

    Args:
        info: Holds the world size, if the caller gave one.
        senders: Number of data-plane senders.
        known: What the client says.

    Raises:
        MessageError: Nobody knows, or the two numbers do not add up.
    """
    if info.world_size is None:
        if known is None:
            raise MessageError("the client cannot tell how many workers it has: pass world_size (senders + workers)")
        return known
    workers = info.world_size - senders
    if workers < 1 or (known is not None and workers != known):
        has = "unknown" if known is None else known
        raise MessageError(
            f"world_size {info.world_size} is not {senders} senders plus the workers behind the client ({has})"
        )
    return workers


def listening_socket(info: TrainerInitInfo, *, trainers: int) -> socket.socket:
    """Rank 0's socket, bound and listening for as long as the engine lives, whatever the number of links.

    Raises:
        MessageError: Port 0 with several trainer ranks, or an address that cannot be bound.
    """
    listener: socket.socket
    if info.listen_socket is not None:
        listener = info.listen_socket
    else:
        if info.master_port == 0 and trainers > 1:
            raise MessageError("master_port 0 is chosen by the system, and the other trainer ranks would not know it")
        family = socket.AF_INET6 if ":" in info.master_address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((info.master_address, info.master_port))
        except OSError as error:
            listener.close()
            raise MessageError(
                f"cannot listen on {info.master_address}:{info.master_port}: {error.strerror}; choose another "
                "master_port, or 0 with a single trainer rank"
            ) from error
    listener.listen(128)
    return listener
