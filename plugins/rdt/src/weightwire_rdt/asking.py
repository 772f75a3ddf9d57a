"""What a worker wants of whom: its own plan, made alone, and the requests that follow from it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from weightwire.deadline import Deadline
from weightwire.link import Link
from weightwire.load_plan import LoadPlan
from weightwire.resharding.incoming import Incoming, incoming_of
from weightwire.resharding.load_plans import workers_of
from weightwire.resharding.planner import Plan
from weightwire_rdt import cluster
from weightwire_rdt.holdings import groups_of, layouts_of, write_request
from weightwire_rdt.messages import ShardedRDTWeightTransferInitInfo

_BESIDE: Final = 8
"""Buffers' worth of bytes that a chunk may have of what is read from where it lies to where it belongs."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one worker rank pulls.

    Attributes:
        incoming: Its chunks.
        requests: For each trainer rank, also those of which it wants nothing.
        takes: Places in the metadata of the parameters of which it wants something.
        lower_bound: Bytes of different elements that it needs.
    """

    incoming: Incoming
    requests: tuple[str, ...]
    takes: tuple[int, ...]
    lower_bound: int
    _key: tuple[Any, ...]

    def fits(self, plan: LoadPlan, link: Link, info: ShardedRDTWeightTransferInitInfo) -> bool:
        """Whether it still is what this worker wants on this link."""
        return self._key == _key(plan, link, info)

    @property
    def owners(self) -> list[int]:
        """The trainer ranks of which something is wanted."""
        return sorted({message.sender for message in self.incoming.messages})

    def by_owner(self) -> dict[str, int]:
        """Bytes from each trainer rank, in words."""
        found: Counter[str] = Counter()
        for message in self.incoming.messages:
            found[f"trainer rank {message.sender}"] += sum(segment.stop - segment.start for segment in message.segments)
        return dict(sorted(found.items()))


def _key(plan: LoadPlan, link: Link, info: ShardedRDTWeightTransferInitInfo) -> tuple[Any, ...]:
    return (
        plan.digest(),
        link.metadata_digest,
        link.info.trainers,
        link.worker,
        bool(link.info.options["whole"]),
        info.buffer_bytes,
        info.direct_bytes,
    )


def wanted_of(plan: LoadPlan, link: Link, info: ShardedRDTWeightTransferInitInfo, *, whole: bool) -> Wanted:
    """What a worker rank with this load plan pulls, and from whom.

    Args:
        plan: What its sink loads.
        link: Says which worker rank it is, of whom.
        info: Sizes.
        whole: Whether trainer ranks hold what they own in full.

    Raises:
        MetadataError: It wants what is not there.
    """
    metadata = link.metadata
    made = Plan(
        layouts_of(metadata, whole=whole),
        link.info.trainers,
        workers_of([plan], metadata),
        buffer=info.buffer_bytes,
        large=min(info.direct_bytes, info.buffer_bytes),
        groups=groups_of(metadata),
        beside=_BESIDE * info.buffer_bytes,
        ordinal=link.worker,
    )
    moves = made.for_worker(0)
    incoming = incoming_of(made, metadata, 0)
    requests = tuple(
        write_request(moves, [message for message in incoming.messages if message.sender == rank], metadata)
        for rank in range(link.info.trainers)
    )
    takes = tuple(sorted(set(moves.parameter.tolist())))
    return Wanted(incoming, requests, takes, made.coverage.lower_bound, _key(plan, link, info))


def ask(wanted: Wanted, producers: Mapping[int, tuple[str, str]], link: Link, deadline: Deadline) -> dict[int, Any]:
    """Hand every trainer rank's producer this worker's request; returns the producers.

    Args:
        wanted: The requests.
        producers: Of each trainer rank the actor's name and namespace.
        link: The link.
        deadline: Of the public call.

    Raises:
        MessageError: A producer refuses a request.
        PeerLost: One is gone.
    """
    ray = cluster.join_cluster()
    calls, actors = [], {}
    for rank, (name, namespace) in sorted(producers.items()):
        whom = f"the producer of trainer rank {rank}"
        actors[rank] = cluster.found(ray, name, namespace, whom)
        text = wanted.requests[rank]
        calls.append((whom, actors[rank].request.remote(name_of(link), link.worker, text)))
    for whom, call in calls:
        cluster.result(call, deadline, whom=whom)
    return actors


def name_of(link: Link) -> str:
    """What a link is called at the producers and in boxes: the same on all ranks, and never again."""
    return link_name(link.info.secret, link.info.epoch)


def link_name(secret: str, epoch: int) -> str:
    """As `name_of`; the name does not tell the secret."""
    return f"{hashlib.sha256(f'rdt {secret}'.encode()).hexdigest()[:16]}-{epoch}"
