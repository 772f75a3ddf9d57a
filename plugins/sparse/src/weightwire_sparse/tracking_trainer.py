"""A trainer engine with a source: every rank finds what changed in its own shards.

A round, the same on every trainer rank:

    begin     each worker shows its revision; each trainer rank says whether it has a snapshot to compare with
    choice    a delta from the oldest of them on, or dense, by what all have heard
    delta-n   each sender announces its payload; if together they gain nothing, dense after all
    transfer  payloads, and pieces that go whole; or every piece whole, into storage beside the live one
    result-n  in some rounds: digests of what would result
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from weightwire.checksums import Checksums
from weightwire.chunk_transfer import ChunkSender, ChunkShare
from weightwire.clients.protocol import PauseMode
from weightwire.deadline import Deadline
from weightwire.errors import ResultDiffers, Unsupported
from weightwire.report import TransferReport
from weightwire_sparse.choice import Choice, choose
from weightwire_sparse.delta import Delta, gains, part_whole
from weightwire_sparse.messages import SparseNCCLTrainerInitInfo
from weightwire_sparse.results import ResultDigests, distinct_plans
from weightwire_sparse.tracker import DeltaTracker
from weightwire_sparse.trainer import SparseNCCLTrainerWeightTransferEngine

_REMEMBERED: Final = 256
"""Revisions of which the find is known."""
_LITTLE: Final = 0.1
"""Share of the dense bytes of a delta after which nobody expects that nearly everything changes."""
_WORTH_SAMPLING: Final = 32 << 20
"""Bytes from which a find takes long enough; of less, a sample says nothing."""


class TrackingTrainer(SparseNCCLTrainerWeightTransferEngine):
    """Sends what its source's tensors are now; made by `trainer_init` with a source."""

    needs_source = True
    compares_standings = True

    tracker: DeltaTracker
    _distrusted = ""
    _choice = Choice(None)
    _verifying = False
    _share: float | None = None
    _little = False
    _attempt = 0

    def _configure(self, info: SparseNCCLTrainerInitInfo) -> None:
        super()._configure(info)
        assert self.source is not None
        self._marks: dict[int, int] = {}
        self._chunk_share = ChunkShare(self._dense.chunks, self.rank)
        self._dense_number = {
            piece.place: number
            for number, piece in enumerate(self._dense.pieces)
            if self._dense.metadata[number].first_owner == self.rank
        }
        self.tracker = DeltaTracker(
            self.source,
            rank=self.rank,
            trainers=self._members.trainers,
            snapshot=info.snapshot,
            kernels=info.kernels,
            threads=info.threads,
            history_bytes=info.history_bytes,
        )

    def shutdown(self) -> None:
        """See `TrainerLink.shutdown`; the tracker's threads end too."""
        super().shutdown()
        self.tracker.shutdown()

    def send_weights(
        self,
        patches: Any = None,
        *,
        weight_version: str | None = None,
        pause: PauseMode | None = None,
        timeout: float | None = None,
    ) -> TransferReport:
        """See `TrainerWeightTransferEngine.send_weights`; falls back by itself to what is right, and reports why."""
        if patches is not None:
            raise Unsupported("this engine has a source and finds what changed by itself: make one without for patches")
        seconds = self.init_info.timeout if timeout is None else timeout
        until = time.monotonic() + seconds
        try:
            return super().send_weights(weight_version=weight_version, pause=pause, timeout=seconds)
        except ResultDiffers as differs:
            self._distrusted = differs.message
        try:
            left = max(0.001, until - time.monotonic())
            return super().send_weights(weight_version=weight_version, pause=pause, timeout=left)
        finally:
            self._distrusted = ""

    # Deciding

    def update_info(self) -> dict[str, Any]:
        """Whether results are compared."""
        return {"verify": self._verifies(self.next_revision.number)}

    def _verifies(self, number: int) -> bool:
        every = self.init_info.verify_every
        return self.init_info.checksum or (every > 0 and number % every == 0)

    @property
    def verified(self) -> bool:
        """Whether the digests of this round's result were compared."""
        return self._verifying

    def prepare_round(self) -> None:
        """Look at a sample: where nearly everything changes each time, looking for more is of no use.

        After a delta that was small there is no need to.
        """
        large = self.tracker.space.nbytes >= _WORTH_SAMPLING
        self._share = self.tracker.sampled() if large and not self._little else None

    def end_round(self) -> None:
        """Have the tracker make its history small while the caller goes on."""
        self.tracker.tidy()

    def standing(self) -> dict[str, Any]:
        """Why this rank can send no delta, if it cannot."""
        why = self._distrusted
        if not why and self._much:
            why = f"{self._share:.0%} of a sample changed"
        elif not why and not self.tracker.ready:
            why = "it has no snapshot to compare with"
        return {"dense": why or None}

    @property
    def _much(self) -> bool:
        return self._share is not None and self._share > self.init_info.dense_above

    def begun(self, standings: dict[int, Any]) -> None:
        """Decide how the round goes, as every trainer rank does."""
        revision = standings[0]["revision"]
        self._attempt = int(revision["number"])
        self._verifying = self._verifies(self._attempt)
        self._choice = choose(standings, trainers=self.fleet.trainers, lineage=revision["lineage"], marks=self._marks)

    def _remember(self, mark: int) -> None:
        """What the revision that this round makes contains."""
        self._marks[self._attempt] = mark
        while len(self._marks) > _REMEMBERED:
            del self._marks[min(self._marks)]

    # Sending

    def transmit(self, number: int, deadline: Deadline) -> int:
        """Send what changed, or every piece whole where that is the only way or costs no more."""
        tracker, began = self.tracker, time.perf_counter()
        self._details = {"reason": self._choice.reason, "kernels": tracker.kernels, "elements": tracker.space.numel}
        base = self._choice.base
        delta = None if base is None else self._delta(base)
        self._details["find_seconds"] = time.perf_counter() - began
        announced = self.announce(f"delta-{number}", delta, self._spaces, deadline)
        if delta is not None and gains(announced, self._spaces, self.init_info.dense_above):
            self._details["way"] = "delta"
            self._little = delta.announcement.nbytes(tracker.space) < _LITTLE * tracker.space.nbytes
            sent = self.transfer(delta, deadline)
        else:
            self._details["way"], self._little = "dense", False
            if delta is not None and not self._details["reason"]:
                self._details["reason"] = f"a delta is more than {self.init_info.dense_above:.0%} of the dense bytes"
            sent = self._send_dense(take=base is None or not tracker.ready, deadline=deadline)
        if self._verifying:
            self._tell_results(number, deadline)
        return sent

    def _delta(self, base: int) -> Delta | None:
        """This rank's delta; None where the history does not reach back to the oldest worker."""
        tracker = self.tracker
        self._remember(tracker.find())
        changes = tracker.since(base)
        if changes is None:
            self._details["reason"] = "what changed since the oldest weights of a worker is forgotten"
            return None
        count = len(changes.addresses)
        if not tracker.holds_pieces:
            return self.pack(changes, tracker.space)
        changes, whole = part_whole(changes, tracker.space)
        delta = self.pack(changes, tracker.space)
        return delta.with_whole({number: tracker.held(number) for number in whole}, count)

    def _send_dense(self, *, take: bool, deadline: Deadline) -> int:
        """Send this rank's pieces whole.

        Args:
            take: Make the snapshot what is sent; otherwise it is that already.
            deadline: Deadline of `send_weights`.
        """
        share, pieces = self._chunk_share, self._dense.pieces
        sending = ChunkSender(
            share,
            self._communicator,
            self._ring,
            list(self.fleet.receivers),
            deadline=deadline,
            checksums=Checksums(enabled=False),
            tell=lambda number, sent: self.told(pieces[number].place + 1, sent, share.total),
        )
        taking = self.tracker.taking(hold=not self._much) if take else None
        for places, tensors in self.batches():
            self._give(sending, places, tensors)
            if taking is not None:
                for place, tensor in zip(places, tensors, strict=True):
                    taking.piece(place, tensor)
            deadline.check()
        if taking is not None:
            self._remember(taking.done())
        sending.finish()
        return sending.sent

    def _give(self, sending: ChunkSender, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        numbers = self._dense_number
        mine = [(numbers[place], tensor) for place, tensor in zip(places, tensors, strict=True) if place in numbers]
        if mine:
            sending.give([number for number, _ in mine], [tensor for _, tensor in mine])

    def _tell_results(self, number: int, deadline: Deadline) -> None:
        """Digest this rank's pieces as each worker does."""
        assert self.rendezvous is not None
        space = self.tracker.space
        results = [ResultDigests(plan, self.metadata) for plan in distinct_plans(self.load_plans)]
        for places, tensors in self.batches():
            for place, tensor in zip(places, tensors, strict=True):
                if place in space.by_place:
                    for result in results:
                        result.of_piece(space.pieces[space.by_place[place]], tensor)
            deadline.check()
        sums = [result.sums() for result in results]
        self.rendezvous.exchange(f"result-{number}", deadline=deadline, payload=sums, gather=True).raise_failed()
