"""A worker's end of one link to a trainer: the phases that every transport goes through, over the rendezvous.

hello      who is here, and does everybody expect the same
targets    what each worker loads, for a transport that plans from it (see `KnownPlans`); then `load-plans`
plan       sender and receiver derived the same plan (its digest)
connected  the data plane stands
begin-n    round n may start: every worker takes what is coming
vote-n     everything is here, on every rank
done-n     what each rank did, after commit
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from weightwire import API_VERSION, __version__
from weightwire.deadline import Deadline
from weightwire.errors import HandshakeError, WeightwireError, describe
from weightwire.layout import ParamMeta, check_metadata, metadata_digest, total_bytes
from weightwire.messages import LinkInfo
from weightwire.rendezvous import Outcome, Rendezvous
from weightwire.session import Revision


def parse_metadata(records: list[dict[str, Any]]) -> tuple[ParamMeta, ...]:
    """Read metadata as it travels.

    Raises:
        MetadataError: A record that describes no parameter, or a name that comes twice.
    """
    metadata = tuple(ParamMeta.from_json(record) for record in records)
    check_metadata(metadata)
    return metadata


class Link:
    """One link, from joining to closing.

    Args:
        info: What the trainer sent.
        index: This rank's place among the ranks of its own server.
        transport: Backend name, for messages.
        deadline: Deadline of the init call.

    Raises:
        HandshakeError: The trainer speaks another API version, or the fleet has no such rank.
        PeerLost: The trainer cannot be reached.
    """

    def __init__(self, info: LinkInfo, *, index: int, transport: str, deadline: Deadline) -> None:
        if not info.api or info.api[0] != API_VERSION[0]:
            raise HandshakeError(
                f"the trainer speaks API {info.api}, this worker (weightwire {__version__}) speaks "
                f"{list(API_VERSION)}: install the same major version on both sides",
                transport=transport,
            )
        self.info = info
        self.transport = transport
        self.worker = info.worker_offset + index
        if self.worker >= info.workers:
            raise HandshakeError(
                f"this is worker rank {self.worker} and the trainer expects {info.workers} workers: "
                "world_size is too small for the servers behind the client",
                transport=transport,
            )
        self.metadata = parse_metadata(info.metadata)
        self.metadata_digest = metadata_digest(self.metadata)
        self.total_bytes = total_bytes(self.metadata)
        self.rendezvous = Rendezvous.join(
            address=info.address,
            port=info.port,
            rank=info.trainers + self.worker,
            secret=bytes.fromhex(info.secret),
            epoch=info.epoch,
            deadline=deadline,
        )

    @property
    def label(self) -> str:
        """This rank in words."""
        return self.rendezvous.label()

    @property
    def alive(self) -> bool:
        """Whether every member of the link is still there, as far as is known."""
        return self.rendezvous.failure is None and not self.rendezvous.closed

    @contextmanager
    def watch(self, deadline: Deadline) -> Iterator[None]:
        """Cancel `deadline` when a member of the link fails."""
        with self.rendezvous.watch(deadline):
            yield

    def hello(self, deadline: Deadline, *, distribution: str, payload: Mapping[str, Any]) -> None:
        """Compare what both sides expect.

        Raises:
            HandshakeError: They differ.
        """
        agree = {
            "backend": self.info.backend,
            "wire": self.info.wire,
            "metadata": self.metadata_digest,
            "senders": self.info.senders,
        }
        self._agree("hello", deadline, agree=agree, payload={"distribution": distribution, **payload})

    def agree_on_plan(self, digest: str, deadline: Deadline, *, error: WeightwireError | None = None) -> None:
        """Compare the digest of the plan; with `error` say why there is none here.

        Raises:
            HandshakeError: Sender and receiver derived different plans.
            WeightwireError: A rank has none; its own words.
        """
        self._agree("plan", deadline, agree={"plan": digest} if error is None else {}, error=error)

    def connected(self, deadline: Deadline) -> None:
        """Say that the data plane stands here, and wait until it stands everywhere."""
        self._agree("connected", deadline)

    def begin(
        self,
        number: int,
        deadline: Deadline,
        *,
        agree: Mapping[str, Any],
        error: WeightwireError | None,
        payload: Mapping[str, Any],
    ) -> Outcome:
        """Say whether round `number` may start here (`error`: why not); returns what everybody said."""
        return self.rendezvous.exchange(
            f"begin-{number}", deadline=deadline, agree=agree, payload=dict(payload), error=error
        )

    def gather(
        self, phase: str, deadline: Deadline, payload: Any = None, *, error: WeightwireError | None = None
    ) -> dict[int, Any]:
        """Exchange a payload with every member, or say why there is none here; returns all payloads by member rank.

        Raises:
            WeightwireError: A member has none; its own words.
        """
        outcome = self.rendezvous.exchange(phase, deadline=deadline, payload=payload, error=error, gather=True)
        outcome.raise_failed()
        return outcome.payloads

    def vote(self, number: int, deadline: Deadline, *, error: WeightwireError | None) -> Outcome:
        """Say whether this rank can commit round `number`; returns what everybody said."""
        return self.rendezvous.exchange(f"vote-{number}", deadline=deadline, error=error)

    def done(self, number: int, payload: Mapping[str, Any]) -> None:
        """Tell the trainers what this rank did; nothing is waited for, since the commit is made already."""
        self.rendezvous.post(f"done-{number}", payload=dict(payload))

    def fail(self, error: BaseException) -> None:
        """Tell every member that this link is over, and why."""
        self.rendezvous.fail(describe(error, transport=self.transport, rank=self.label))

    def close(self) -> None:
        """Leave the link; idempotent."""
        self.rendezvous.close()

    def _agree(
        self,
        phase: str,
        deadline: Deadline,
        *,
        agree: Mapping[str, Any] | None = None,
        payload: Any = None,
        error: WeightwireError | None = None,
    ) -> None:
        outcome = self.rendezvous.exchange(phase, deadline=deadline, agree=agree or {}, payload=payload, error=error)
        outcome.raise_failed()


def base_error(base: Mapping[str, Any] | None, held: Revision) -> WeightwireError | None:
    """Why an update that stands on `base` does not fit a worker that holds `held`; None if it does."""
    if base is None or Revision.from_json(base) == held:
        return None
    return HandshakeError(
        f"the update stands on revision {base['number']} of lineage {base['lineage'][:8]} and this worker holds "
        f"revision {held.number} of lineage {held.lineage[:8]}: send a full update"
    )
