"""How the members of a link come to know what every worker loads: digests first, then each distinct plan once."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from typing import Final

from weightwire.deadline import Deadline
from weightwire.errors import HandshakeError, WeightwireError
from weightwire.load_plan import LoadPlan
from weightwire.rendezvous import Rendezvous

_LARGEST: Final = 1 << 30


class KnownPlans:
    """The load plans that one member has seen; kept from link to link, since they are long and seldom change."""

    def __init__(self) -> None:
        self._by_digest: dict[str, LoadPlan] = {}

    def exchange(
        self,
        rendezvous: Rendezvous,
        deadline: Deadline,
        own: LoadPlan | None = None,
        *,
        error: WeightwireError | None = None,
    ) -> list[LoadPlan]:
        """Tell what this worker loads, if it is one, and hear it of all; every member of the link takes part.

        Two phases: in `targets` each worker posts the digest of its plan, and every member those that it knows
        already; in `load-plans` the first holder of each digest that somebody does not know posts the plan.

        Args:
            rendezvous: The link.
            deadline: Deadline of the public call.
            own: This worker's plan; None on a trainer rank.
            error: Why this worker has none.

        Returns:
            By worker rank; workers that load alike share one object.

        Raises:
            WeightwireError: A worker cannot say what it loads; in its words.
            HandshakeError: A plan is not the one that was announced.
            PeerLost, DeadlineExceeded: As `Rendezvous.exchange`.
        """
        digest = own.digest() if own is not None else None
        if own is not None and digest is not None:
            self._by_digest[digest] = own
        payload = {"digest": digest, "known": sorted(self._by_digest)}
        told = rendezvous.exchange("targets", deadline=deadline, payload=payload, gather=True, error=error)
        told.raise_failed()
        digests = [told.payloads[rank]["digest"] for rank in sorted(told.payloads)]
        wanted = [one for one in digests if one is not None]
        everywhere = set.intersection(*(set(said["known"]) for said in told.payloads.values()))
        mine = own is not None and digest not in everywhere and digests.index(digest) == rendezvous.rank
        body = _packed(own) if own is not None and mine else None
        posted = rendezvous.exchange("load-plans", deadline=deadline, payload=body, gather=True)
        posted.raise_failed()
        for rank, text in sorted(posted.payloads.items()):
            if text is not None and digests[rank] not in self._by_digest:
                self._by_digest[digests[rank]] = _unpacked(text, digests[rank])
        self._by_digest = {one: self._by_digest[one] for one in wanted}
        return [self._by_digest[one] for one in wanted]


def _packed(plan: LoadPlan) -> str:
    return base64.b64encode(zlib.compress(plan.to_json().encode(), 1)).decode()


def _unpacked(text: str, digest: str) -> LoadPlan:
    """The plan that `_packed` wrote.

    Raises:
        HandshakeError: It is no such text, or that of another plan.
        MessageError: It holds no plan.
    """
    try:
        raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _LARGEST)
    except (binascii.Error, ValueError, TypeError, zlib.error) as error:
        raise HandshakeError(f"a load plan cannot be read: {error}") from None
    if hashlib.sha256(raw).hexdigest() != digest:
        raise HandshakeError("a load plan is not the one whose digest was announced")
    return LoadPlan.from_json(raw.decode())
