"""The trainer's side: every rank offers what was asked of it, from its own shards; nobody gathers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

from weightwire.checksums import Checksums
from weightwire.clients.protocol import PauseMode
from weightwire.deadline import Deadline
from weightwire.errors import MessageError
from weightwire.fleet import owners_of, trainer_count
from weightwire.packing import BufferRing
from weightwire.report import ProgressEvent, TransferReport
from weightwire.resharding.outgoing import Outgoing, Sending, merged, new_ring
from weightwire.resharding.receipts import message_number
from weightwire.trainer import TrainerWeightTransferEngine
from weightwire_rdt import cluster
from weightwire_rdt.asking import link_name
from weightwire_rdt.holdings import holding_of, outgoing_of
from weightwire_rdt.meeting import Meeting, available
from weightwire_rdt.messages import ShardedRDTTrainerInitInfo
from weightwire_rdt.offering import Offering
from weightwire_rdt.outlet import Outlet
from weightwire_rdt.producer import Producer
from weightwire_rdt.ways import End, trainer_ways

_SLICE = 0.5
_MARGIN = 64
_producer = cluster.Beside(Producer, "producer")


class ShardedRDTTrainerWeightTransferEngine(TrainerWeightTransferEngine[ShardedRDTTrainerInitInfo]):
    """Lets each worker pull the regions that it loads."""

    init_info_cls = ShardedRDTTrainerInitInfo
    consumes: Literal["full", "local"] = "local"

    _producer: Any = None
    _link_name = ""
    _outgoing: Outgoing | None = None
    _wire: Outlet | None = None
    _way = ""
    _live: Collection[int] | None = None
    _ring: BufferRing | None = None
    _moved: Mapping[str, int]

    def _configure(self, info: ShardedRDTTrainerInitInfo) -> None:
        source = self.source
        if source is not None and not source.implements_iter_local() and source.implements_iter_full():
            self.consumes = "full"
        if info.num_consumers is not None and source is not None:
            senders = owners_of(tuple(source.metadata), trainers=trainer_count(info))
            total = len(senders) + info.num_consumers
            if info.world_size not in (None, total):
                raise MessageError(f"world_size {info.world_size} is not {len(senders)} senders plus num_consumers")
            info = dataclasses.replace(info, world_size=total)
        super()._configure(info)
        self._holding = holding_of(
            self.metadata,
            self.rank,
            whole=self.consumes == "full",
            buffer_bytes=info.buffer_bytes,
            direct_bytes=info.direct_bytes,
        )

    def choose_senders(self, trainers: int) -> tuple[int, ...]:
        """Every rank that owns anything: which of them a worker asks is for the worker to say."""
        return owners_of(self.metadata, trainers=trainers)

    def worker_init_info(self) -> dict[str, Any]:
        """The sizes that requests depend on."""
        info = self.init_info
        return {
            "trainer_actor_namespace": info.trainer_actor_namespace,
            "tensor_transport": info.tensor_transport,
            "num_rdt_buffers": info.num_rdt_buffers,
            "buffer_bytes": info.buffer_bytes,
            "direct_bytes": info.direct_bytes,
            "stall_timeout_s": info.stall_timeout_s,
        }

    def link_options(self) -> dict[str, Any]:
        """What may go to nobody, and whether ranks hold what they own in full."""
        return {"foreign": self.init_info.foreign, "whole": self.consumes == "full"}

    @property
    def path(self) -> str:
        """The way the bytes take, for the report."""
        return f"pulled over {self._way}"

    @property
    def goes_on_without_workers(self) -> bool:
        """Whether the way of the open link lets it."""
        return self._wire is not None and self._wire.goes_on

    def choose_workers(self) -> Collection[int] | None:
        """Those that `send_weights` was told."""
        return self._live

    def send_weights(
        self,
        patches: Any = None,
        *,
        weight_version: str | None = None,
        pause: PauseMode | None = None,
        timeout: float | None = None,
        live_consumer_ids: Collection[int] | None = None,
    ) -> TransferReport:
        """See `TrainerWeightTransferEngine.send_weights`.

        Args:
            patches: None.
            weight_version: As there.
            pause: As there.
            timeout: As there.
            live_consumer_ids: The worker ranks that take part, all of a server or none; the others are left out
                until the link is opened again. The same on every trainer rank; None for all that are there.

        Raises:
            MessageError: There are no such worker ranks, or the client cannot leave the others out.
        """
        if live_consumer_ids is not None:
            self._check_live(live_consumer_ids)
        self._live = live_consumer_ids
        try:
            return super().send_weights(patches, weight_version=weight_version, pause=pause, timeout=timeout)
        finally:
            self._live = None

    def _check_live(self, ranks: Collection[int]) -> None:
        there = range(self.fleet.workers)
        if not ranks or any(type(rank) is not int or rank not in there for rank in ranks):
            raise MessageError(
                f"live_consumer_ids {list(ranks)} are not worker ranks of 0 to {len(there) - 1}, at least one",
                transport="sharded_rdt",
            )

    # Opening a link

    def connect(self, deadline: Deadline) -> None:
        """Take the workers' requests, and agree with all ranks how bytes travel.

        Raises:
            UpdateRefused: No worker takes a parameter, and sinks are strict.
            HandshakeError: No way for bytes works between all ranks.
            PeerLost: The producer is gone.
        """
        rendezvous, info = self.rendezvous, self.init_info
        assert rendezvous is not None
        link = link_name(self._members.secret.hex(), self.epoch)
        producer = self._open_producer(link, deadline)

        def gather(phase: str, payload: Any) -> Mapping[int, Any]:
            outcome = rendezvous.exchange(phase, deadline=deadline, payload=payload, gather=True)
            outcome.raise_failed()
            return outcome.payloads

        payload = {"ways": available(self._device()), "producer": producer}
        meeting = Meeting(gather("rdt-meet", payload), self.fleet.trainers, rendezvous.label)
        meeting.check_claimed(self.metadata, info.foreign)
        self._outgoing = self._collect(link, deadline)
        workers = sorted({message.worker for message in self._outgoing.messages})
        end = End(
            link=link,
            rank=self.rank,
            peers=workers,
            fleet=self.fleet,
            rendezvous=rendezvous,
            producers={self.rank: self._producer},
            device=self._device(),
            stall=info.stall_timeout_s,
            piece_bytes=info.buffer_bytes,
            window=info.num_rdt_buffers,
            parted=self.parted_workers,
        )
        self._way, wire = meeting.agree(info.tensor_transport, trainer_ways(end), gather, deadline)
        self._wire = wire
        self._ring = new_ring(
            len(workers), wire.ahead * info.num_rdt_buffers, info.buffer_bytes + _MARGIN, self._device()
        )

    def _open_producer(self, link: str, deadline: Deadline) -> list[str]:
        """Open the link at this process's producer; returns that one's name and namespace."""
        where = self.init_info.trainer_actor_namespace or cluster.namespace()
        name, self._producer = _producer.get(where, deadline, whom=self._door)
        self._link_name = link
        opening = (link, self._holding.to_json(), self.fleet.workers)
        cluster.result(self._producer.open.remote(*opening), deadline, whom=self._door)
        return [name, where]

    @property
    def _door(self) -> str:
        return f"the producer of trainer rank {self.rank}"

    def _collect(self, link: str, deadline: Deadline) -> Outgoing:
        """What all workers ask of this rank."""
        while True:
            answer = cluster.result(self._producer.requests.remote(link, _SLICE), deadline, whom=self._door)
            if len(answer["requests"]) == self.fleet.workers:
                break
            deadline.check(f"{self._door} to hear from all workers")
        holding = self._holding
        return merged(
            [
                outgoing_of(holding.read(text, worker), holding, worker)
                for worker, text in sorted(answer["requests"].items())
            ]
        )

    # A round

    def transmit(self, number: int, deadline: Deadline) -> int:
        """Offer what was asked of this rank, and see it read; the rest is iterated so that gathers line up."""
        wire = self._wire
        assert wire is not None
        wire.begin_round(number)
        try:
            return self._offer_all(wire, number, deadline)
        finally:
            wire.end_round()

    def _offer_all(self, wire: Outlet, number: int, deadline: Deadline) -> int:
        assert self._outgoing is not None and self._ring is not None
        checksums = Checksums(enabled=self.init_info.checksum)
        sending = Sending(
            self._outgoing,
            wire,
            self._ring,
            offset=0,
            deadline=deadline,
            checksums=checksums,
            number=lambda message: message_number(self.rank, message.worker, message.ordinal),
            tell=self._told,
        )
        assert self.source is not None
        offering = Offering(
            sending,
            wire,
            [self._holding.groups[place] for place, _ in self.reader.owned],
            lookahead=None if self.source.resident() is not None else self.init_info.gather_lookahead,
            metadata=self.metadata,
            straight={
                place for place, pieces in self._outgoing.pieces.items() if any(piece.straight for piece in pieces)
            },
        )
        for places, tensors in self.batches():
            for place, tensor in zip(places, tensors, strict=True):
                offering.offer(place, tensor, deadline)
            deadline.check()
        sending.finish()
        offering.check_unwritten()
        if checksums.enabled:
            assert self.rendezvous is not None
            self.rendezvous.exchange(
                f"checksum-{number}", deadline=deadline, payload=checksums.values, gather=True
            ).raise_failed()
        return sending.sent

    def _told(self, sent: int) -> None:
        if self.on_progress is not None:
            assert self._outgoing is not None
            self.on_progress(
                ProgressEvent(
                    phase="transfer", parameters=len(self.metadata), bytes_done=sent, bytes=self._outgoing.nbytes
                )
            )

    # Closing it

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Let go of the wire, and close the link at the producer."""
        wire, self._wire = self._wire, None
        producer, self._producer = self._producer, None
        self._ring, self._outgoing = None, None
        if wire is not None:
            wire.close(error)
        if producer is not None:
            cluster.tell(producer.close, self._link_name)
