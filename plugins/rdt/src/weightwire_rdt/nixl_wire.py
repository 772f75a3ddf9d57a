"""Chunks over NIXL: a trainer rank offers where they lie, and the worker reads them from there.

    trainer rank -> worker   offer: round, ordinal, spans, and what was registered since the last one
    worker -> trainer rank   read: round, ordinals

Neither is a call. A read takes nothing of the trainer rank; it hears of it when it next looks, which a thread of its
own does while a round lasts.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weightwire.deadline import Deadline
from weightwire.errors import PeerLost, TransferError
from weightwire.packing import Pending
from weightwire_rdt.nixl_agent import NixlAgent, Polling, Read, Span, memory_of, span_of
from weightwire_rdt.outlet import PARTING_SECONDS, Offers, Unneeded
from weightwire_rdt.patience import WORKER_SECONDS, Patience
from weightwire_rdt.pulling import Chunk
from weightwire_rdt.registrations import Registrations


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a wire.

    Attributes:
        label: In words.
        agent: Name of its NIXL agent.
        box: Where its notifications go.
    """

    label: str
    agent: str
    box: str


class NixlServing(Offers):
    """A trainer rank's end.

    Args:
        agent: The process's agent.
        rank: This trainer rank.
        peers: Every worker that asked for something, by rank.
        label: This rank in words.
        box: This rank's box.
        stall: Seconds in which nothing moves that are too many.
        parted: Tells which workers the link goes on without.

    Attributes:
        ahead: See `Outlet`.
    """

    ahead = 1

    def __init__(
        self,
        agent: NixlAgent,
        rank: int,
        peers: Mapping[int, Peer],
        *,
        label: str,
        box: str,
        stall: float,
        parted: Callable[[], Collection[int]] = tuple,
    ) -> None:
        super().__init__(label, {worker: peer.label for worker, peer in peers.items()}, stall, parted)
        self._agent = agent
        self._rank = rank
        self._peers = peers
        self._box = box
        self._registrations = Registrations(agent.register_storage, agent.deregister)
        self._told = dict.fromkeys(peers, 0)
        self._polling = Polling(agent)
        agent.open_box(box)

    def begin_round(self, number: int) -> None:
        """A round begins."""
        super().begin_round(number)
        self._registrations.sweep()
        self._polling.start()

    def end_round(self) -> None:
        """It is over, however it ended."""
        self._polling.stop()

    def send(self, buffers: Sequence[Tensor], to: Sequence[int], *, deadline: Deadline) -> Pending:
        """Offer the next chunk to the worker in `to`; the buffers may be used again once it is done.

        Raises:
            PeerLost: The worker is gone.
        """
        (worker,) = to
        if self._has_parted(worker):
            return Unneeded()
        peer = self._peers[worker]
        for buffer in buffers:
            self._registrations.hold(buffer)
        ordinal, pending = self._offer(buffers, worker)
        offer: dict[str, Any] = {
            "owner": self._rank,
            "round": self._round,
            "chunk": ordinal,
            "spans": [span_of(buffer) for buffer in buffers],
            "memory": memory_of(buffers[0].device),
        }
        if self._told[worker] != self._registrations.changes:
            offer["agent"] = base64.b64encode(self._agent.metadata()).decode()
            self._told[worker] = self._registrations.changes
        try:
            self._agent.notify(peer.agent, peer.box, json.dumps(offer, separators=(",", ":")).encode())
        except PeerLost as error:
            if self._has_parted(worker, PARTING_SECONDS):
                return Unneeded()
            raise PeerLost(f"{peer.label}: {error.message}", transport="sharded_rdt", rank=self._label) from error
        return pending

    def _poll(self) -> bool:
        moved = False
        for body in self._agent.take(self._box):
            worker, number, ordinals = json.loads(body)
            for ordinal in ordinals if number == self._round else ():
                moved |= self._was_read(worker, ordinal)
        return moved

    def close(self, error: BaseException | None = None) -> None:
        """Let go of everything."""
        self.end_round()
        self._agent.close_box(self._box)
        self._offered.clear()
        self._registrations.close()


class _Reading:
    """A read on its way, of which the trainer rank hears once it is done."""

    def __init__(self, read: Read, tell: Callable[[], None], kept: Sequence[Tensor]) -> None:
        self._read = read
        self._kept = kept
        self._tell = tell
        self._told = False

    @property
    def done(self) -> bool:
        if not self._told and self._read.done:
            self._told = True
            self._tell()
        return self._told

    @property
    def ended(self) -> bool:
        return self._told or self._read.ended


@dataclass(slots=True)
class _Offer:
    spans: list[Span]
    memory: str


class NixlReading:
    """A worker's end.

    Args:
        agent: The process's agent.
        worker: This worker rank.
        peers: Every trainer rank that it asked for something.
        label: This rank in words.
        box: This rank's box.
        stall: Seconds in which nothing moves that are too many.

    Attributes:
        divides: See `Inbound`.
    """

    divides = True

    def __init__(
        self, agent: NixlAgent, worker: int, peers: Mapping[int, Peer], *, label: str, box: str, stall: float
    ) -> None:
        self._agent = agent
        self._worker = worker
        self._peers = peers
        self._label = label
        self._box = box
        self._stall = stall
        self._registrations = Registrations(agent.register_storage, agent.deregister)
        self._round = 0
        self._offers: dict[tuple[int, int, int], _Offer] = {}
        self._patience = Patience(stall + WORKER_SECONDS)
        self._reads: list[_Reading] = []
        agent.open_box(box)

    def begin_round(self, number: int) -> None:
        """A round begins."""
        self._round = number
        self._offers = {key: offer for key, offer in self._offers.items() if key[0] == number}
        self._registrations.sweep()
        self._patience = Patience(self._stall + WORKER_SECONDS)

    def ready(self, owner: int, ordinal: int) -> bool:
        """Whether a trainer rank has offered a chunk."""
        key = (self._round, owner, ordinal)
        if key not in self._offers:
            self._poll()
        return key in self._offers

    def _poll(self) -> None:
        for body in self._agent.take(self._box):
            record = json.loads(body)
            owner = record["owner"]
            if "agent" in record:
                self._agent.meet(self._peers[owner].agent, base64.b64decode(record["agent"]))
            spans = [Span(*span) for span in record["spans"]]
            self._offers[record["round"], owner, record["chunk"]] = _Offer(spans, record["memory"])

    def pause(self, deadline: Deadline, owners: Sequence[int]) -> None:
        """Wait a moment for any of these trainer ranks to offer something.

        Raises:
            PeerStalled: They have offered nothing for too long.
        """
        names = ", ".join(self._peers[owner].label for owner in owners)
        self._patience.pause(deadline, f"{self._label} waits for {names} to have its next parameters ready")

    def receive(self, chunks: Sequence[Chunk], owner: int, deadline: Deadline) -> _Reading:
        """Begin to read chunks that are `ready`.

        Raises:
            TransferError: It is not what was asked for.
            PeerLost: The trainer rank is gone.
        """
        self._patience.moved()
        peer = self._peers[owner]
        here: list[Span] = []
        there: list[Span] = []
        for chunk in chunks:
            offer = self._offers.pop((self._round, owner, chunk.ordinal))
            mine = [span_of(buffer) for buffer in chunk.buffers]
            there += self._cut(peer, mine, offer.spans)
            for buffer in chunk.buffers:
                self._registrations.hold(buffer)
            here += mine
        body = json.dumps([self._worker, self._round, [chunk.ordinal for chunk in chunks]]).encode()
        memory = (memory_of(chunks[0].buffers[0].device), offer.memory)
        try:
            read = self._agent.read(peer.agent, here, there, memory)
        except PeerLost as error:
            raise PeerLost(f"{peer.label}: {error.message}", transport="sharded_rdt", rank=self._label) from error
        self._reads = [one for one in self._reads if not one.ended]
        # What is written to must be kept for as long.
        kept = [buffer for chunk in chunks for buffer in chunk.buffers]
        reading = _Reading(read, lambda: self._agent.notify(peer.agent, peer.box, body), kept)
        self._reads.append(reading)
        return reading

    def _cut(self, peer: Peer, mine: Sequence[Span], theirs: Sequence[Span]) -> list[Span]:
        """What a trainer rank offers as pieces of the lengths of `mine`: what lies together there goes apart here."""
        found: list[Span] = []
        places = iter(mine)
        for span in theirs:
            start = 0
            while start < span.nbytes and (place := next(places, None)) is not None:
                found.append(Span(span.address + start, place.nbytes, span.device))
                start += place.nbytes
            if start != span.nbytes:
                break
        else:
            if len(found) == len(mine):
                return found
        wanted, offered = [span.nbytes for span in mine], [span.nbytes for span in theirs]
        raise TransferError(
            f"{peer.label} offers {offered[:4]} bytes where {wanted[:4]} were asked for",
            transport="sharded_rdt",
            rank=self._label,
        )

    def close(self, error: BaseException | None = None) -> None:
        """Let go of everything; of the memory of reads that are still on their way once they have ended."""
        self._agent.close_box(self._box)
        self._offers.clear()
        going, self._reads = [one for one in self._reads if not one.ended], []
        self._agent.once_ended(going, self._registrations.close)
