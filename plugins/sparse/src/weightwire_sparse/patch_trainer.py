"""A trainer engine without a source: rank 0 sends a caller's patches, the other ranks do nothing at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from weightwire.clients.protocol import PauseMode, VLLMWeightSyncClient
from weightwire.control_call import ControlCall
from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta, dtype_name
from weightwire.report import TransferReport
from weightwire.sink import Scope
from weightwire.source import WeightSource
from weightwire_sparse.messages import SparseNCCLTrainerInitInfo
from weightwire_sparse.patches import SparseWeightPatch, changes_of, metadata_of, space_of
from weightwire_sparse.trainer import SparseNCCLTrainerWeightTransferEngine


class PatchTrainer(SparseNCCLTrainerWeightTransferEngine):
    """Sends patches; made by `trainer_init` without a source."""

    _sending: _Coded | None = None
    _chunk = 0

    @classmethod
    def trainer_init(
        cls,
        init_info: SparseNCCLTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """See `TrainerWeightTransferEngine.trainer_init`; nobody hears of ranks other than 0."""
        if init_info.rank != 0:
            engine = cls(client=client, is_sender=False, rank=init_info.rank)
            engine.init_info = init_info
            return engine
        return super().trainer_init(dataclasses.replace(init_info, num_trainer_ranks=1), client=client)

    def shutdown(self) -> None:
        """See `TrainerLink.shutdown`."""
        if self.is_sender:
            super().shutdown()

    def send_weights(
        self,
        patches: Sequence[SparseWeightPatch] | None = None,
        *,
        weight_version: str | None = None,
        pause: PauseMode | None = None,
        timeout: float | None = None,
    ) -> TransferReport:
        """Change some elements of the workers' weights, on all workers or on none.

        Args:
            patches: What to change, on top of the weights that this engine left. None or empty calls nobody.
            weight_version: A label for people, told to the workers on commit.
            pause: Pause the workers' readers around the update, in this mode.
            timeout: Deadline in seconds; None means the init info's.

        Raises:
            UpdateRefused: A patch that cannot be, and nobody was called; or a worker's model cannot be patched.
            HandshakeError: A worker holds other weights than this engine left there.
            TransferError: A rank failed, died or stopped; it is named, and the workers are on their old weights.
            DeadlineExceeded: The time is over; the workers are on their old weights.
        """
        if not self.is_sender or not patches:
            return self._nothing()
        self._sending = _Coded(self, patches)
        try:
            return super().send_weights(weight_version=weight_version, pause=pause, timeout=timeout)
        finally:
            self._sending = None

    def send_weight_chunk(self, patches: Sequence[SparseWeightPatch] | None, *, timeout: float | None = None) -> None:
        """Transfer patches within an update that the caller has started, and will finish, through the client.

        Each worker commits by itself when the caller finishes.

        Args:
            patches: As in `send_weights`.
            timeout: Deadline in seconds; None means the init info's.

        Raises:
            WeightwireError: As `send_weights`; what fails on the way takes the link down.
        """
        if not self.is_sender or not patches:
            return
        coded = _Coded(self, patches)
        deadline = Deadline(self.init_info.timeout if timeout is None else timeout, what="send_weight_chunk")
        if not self.linked:
            self._reopen(deadline)
        assert self.rendezvous is not None
        self._chunk += 1
        update = {
            **coded.update_info(),
            "chunk": self._chunk,
            "scope": "partial",
            "trainer": self.trainer_id,
            "timeout": deadline.remaining(),
        }
        call = ControlCall(lambda: self.control.update_callers(update, deadline), deadline, what="update_weights")
        try:
            with self.rendezvous.watch(deadline):
                self._send_coded(coded, f"patches-{self._chunk}", deadline)
                call.result()
        except BaseException as raised:
            call.conclude()
            error = self.rendezvous.explain(raised)
            self._take_down(error)
            if error is not raised:
                raise error from raised
            raise

    def _nothing(self) -> TransferReport:
        revision = self.acknowledged.to_json() if self.acknowledged is not None else {}
        return TransferReport(
            transport=self.backend,
            path="nothing to send",
            round=self._round,
            scope="partial",
            parameters=0,
            bytes=0,
            seconds={},
            label=None,
            revision=revision,
            previous=revision or None,
            ranks=(),
        )

    # A round

    @property
    def round_metadata(self) -> tuple[ParamMeta, ...]:
        """What the patches are of."""
        return self.metadata if self._sending is None else self._sending.metadata

    @property
    def scope(self) -> Scope:
        """Patches are of some parameters only."""
        return "partial"

    @property
    def verified(self) -> bool:
        """The trainer does not know what results."""
        return False

    def update_info(self) -> dict[str, Any]:
        """What the patches are of, and the revision they stand on."""
        assert self._sending is not None
        base = {} if self.acknowledged is None else {"base": self.acknowledged.to_json()}
        return {**self._sending.update_info(), **base}

    def transmit(self, number: int, deadline: Deadline) -> int:
        """Send the patches."""
        assert self._sending is not None
        return self._send_coded(self._sending, f"delta-{number}", deadline)

    def _send_coded(self, coded: _Coded, phase: str, deadline: Deadline) -> int:
        self._details = {"way": "patches", "kernels": self._kernels}
        self.announce(phase, coded.delta, {0: coded.space}, deadline)
        return self.transfer(coded.delta, deadline)


class _Coded:
    """A caller's patches, checked and coded before anybody is called."""

    def __init__(self, engine: PatchTrainer, patches: Sequence[SparseWeightPatch]) -> None:
        self.metadata = metadata_of(patches)
        self.space = space_of(self.metadata)
        self.delta = engine.pack(changes_of(patches, self.space), self.space)
        self._counts = [len(patch.indices) for patch in patches]

    def update_info(self) -> dict[str, Any]:
        """The reference's fields."""
        return {
            "names": [meta.name for meta in self.metadata],
            "dtype_names": [dtype_name(meta.dtype) for meta in self.metadata],
            "shapes": [list(meta.shape) for meta in self.metadata],
            "num_updates_list": self._counts,
        }
