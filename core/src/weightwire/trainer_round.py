"""One round as a trainer rank goes through it.

begin     rank 0 calls start and update_weights beside; everybody hears whether each worker takes what is coming
transfer  the transport sends
finish    rank 0 calls finish beside; everybody votes; the workers commit and say what they did
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from weightwire import faults
from weightwire.clients.protocol import PauseMode
from weightwire.control_call import ControlCall
from weightwire.deadline import Deadline
from weightwire.errors import WeightwireError
from weightwire.layout import metadata_digest, total_bytes
from weightwire.rendezvous import Outcome, Rendezvous
from weightwire.report import ProgressEvent, RankReport, TransferReport

if TYPE_CHECKING:
    from weightwire.trainer import TrainerWeightTransferEngine


class TrainerRound:
    """One round of one trainer rank.

    Args:
        engine: The transport.
        rendezvous: The link.
        number: Number of the round within the link.
        label: The workers' new `weight_version`, if it changes.
        pause: How hosts that pause by themselves do so, if they shall.
        deadline: Deadline of `send_weights`.
    """

    def __init__(
        self,
        engine: TrainerWeightTransferEngine[Any],
        rendezvous: Rendezvous,
        number: int,
        label: str | None,
        deadline: Deadline,
        *,
        pause: PauseMode | None = None,
    ) -> None:
        self._pause = pause
        self._engine = engine
        self._rendezvous = rendezvous
        self._number = number
        self._label = label
        self._deadline = deadline
        self._call: ControlCall | None = None
        self._seconds: dict[str, float] = {}
        self.begun = False
        """Whether every rank agreed that the round starts; nothing moved before."""
        self.refused = False
        """Whether the round ended with a refusal that every rank heard of, so that the link stays."""

    def run(self, *, reinitialised: bool) -> TransferReport:
        """Go through the round.

        Raises:
            WeightwireError: As `TrainerWeightTransferEngine.send_weights`.
        """
        engine, number = self._engine, self._number
        with self._timed("begin"):
            self._tell("begin")
            self._beside(self._start_and_update, "update_weights")
            refusal = self._prepared()
            outcome = self._rendezvous.exchange(
                f"begin-{number}",
                deadline=self._deadline,
                agree={"metadata": self._metadata_digest(), "scope": engine.scope},
                error=refusal,
                payload=self._standing(),
                gather=engine.compares_standings,
            )
            self._decide(outcome)
            if engine.compares_standings:
                engine.begun(outcome.payloads)
        self.begun = True
        faults.reach("trainer.begin")
        self._rendezvous.note_phase(f"transfer-{number}")
        with self._timed("transfer"):
            with torch.no_grad():
                sent = engine.transmit(number, self._deadline)
            self._result()
        faults.reach("trainer.sent")
        with self._timed("finish"):
            self._tell("finish")
            self._beside(lambda: engine.control.finish(self._label, self._deadline), "finish_weight_update")
            self._decide(self._rendezvous.exchange(f"vote-{number}", deadline=self._deadline))
            self._result()
            payload = {"bytes": sent, "seconds": self._seconds, "details": engine.report_details()}
            if engine.is_sender:
                payload["revision"] = self._engine.next_revision.to_json()
            done = self._rendezvous.exchange(f"done-{number}", deadline=self._deadline, payload=payload, gather=True)
            done.raise_failed()
        self._tell("done")
        return self._report(done, reinitialised=reinitialised)

    def _standing(self) -> dict[str, Any]:
        engine = self._engine
        own = {"revision": engine.next_revision.to_json()} if engine.is_sender else {}
        return {**own, **engine.standing()}

    def _metadata_digest(self) -> str:
        engine = self._engine
        if engine.round_metadata is engine.metadata:
            return engine.metadata_digest
        return metadata_digest(engine.round_metadata)

    def _total_bytes(self) -> int:
        engine = self._engine
        return engine.total_bytes if engine.round_metadata is engine.metadata else total_bytes(engine.round_metadata)

    def _prepared(self) -> WeightwireError | None:
        try:
            with torch.no_grad():
                self._engine.prepare_round()
        except WeightwireError as error:
            return error
        return None

    def _start_and_update(self) -> None:
        engine = self._engine
        update = {
            **engine.update_info(),
            "round": self._number,
            "trainer": engine.trainer_id,
            "revision": self._engine.next_revision.to_json(),
            "scope": engine.scope,
            "label": self._label,
            "pause": self._pause,
            "timeout": self._deadline.remaining(),
        }
        engine.control.start(self._deadline, draft=engine.init_info.draft)
        engine.control.update(update, self._deadline)

    def _beside(self, call: Callable[[], None], what: str) -> None:
        if self._engine.is_sender:
            self._call = ControlCall(call, self._deadline, what=what)

    def _decide(self, outcome: Outcome) -> None:
        if outcome.unanimous:
            return
        self.refused = True
        if self._call is not None:
            # The next round's start must not meet this one's update.
            self._call.conclude()
            self._call.ended(self._deadline)
        outcome.raise_failed()

    def _result(self) -> None:
        if self._call is not None:
            self._call.result()

    def conclude(self) -> None:
        """The round is over: a control call still under way interrupts nobody."""
        if self._call is not None:
            self._call.conclude()

    def linger(self) -> None:
        """Give a control call under way a moment to end."""
        if self._call is not None:
            self._call.linger()

    def _report(self, done: Outcome, *, reinitialised: bool) -> TransferReport:
        engine = self._engine
        ranks = []
        for rank, payload in sorted(done.payloads.items()):
            ranks.append(
                RankReport(
                    rank=self._rendezvous.label(rank),
                    bytes=payload["bytes"],
                    seconds=payload["seconds"],
                    details=payload.get("details", {}),
                )
            )
        previous = engine.acknowledged
        outcomes = getattr(engine.client, "outcomes", None)
        return TransferReport(
            transport=engine.backend,
            path=engine.path,
            round=self._number,
            scope=engine.scope,
            parameters=len(engine.round_metadata),
            bytes=self._total_bytes(),
            seconds=self._seconds,
            label=self._label,
            revision=done.payloads[0]["revision"],
            previous=previous.to_json() if previous is not None else None,
            ranks=tuple(ranks),
            reinitialised=reinitialised,
            verified=engine.verified,
            servers=tuple(outcomes()) if callable(outcomes) else (),
        )

    def _tell(self, phase: str) -> None:
        if self._engine.on_progress is not None:
            self._engine.on_progress(ProgressEvent(phase=phase, parameters=len(self._engine.round_metadata)))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[phase] = time.perf_counter() - began
