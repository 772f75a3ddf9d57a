"""The trainer's side: every parameter goes from its first owner to all workers of this host.

What lies in shared memory is read there by each worker. What does not is copied once: into a ring that all workers
read, or, where workers adopt, into the idle one of two segments that hold the whole model.
"""

from __future__ import annotations

from typing import Any, Literal, Self, cast

import torch

from weightwire import faults
from weightwire.checksums import Checksums
from weightwire.clients.protocol import VLLMWeightSyncClient
from weightwire.deadline import Deadline
from weightwire.errors import HandshakeError, MessageError
from weightwire.report import ProgressEvent
from weightwire.source import WeightSource
from weightwire.trainer import TrainerWeightTransferEngine
from weightwire_ipc.device import device_uuid
from weightwire_ipc.doorway import Doorway
from weightwire_ipc.feed import Feed
from weightwire_ipc.guard import install
from weightwire_ipc.host import apart, apart_on_device, identity
from weightwire_ipc.messages import IPCTrainerInitInfo
from weightwire_ipc.outgoing import Outgoing, Prepared
from weightwire_ipc.sending import Sending
from weightwire_ipc.stock import StockIPCTrainer


class IPCTrainerWeightTransferEngine(TrainerWeightTransferEngine[IPCTrainerInitInfo]):
    """Hands dense weights to the workers of this host."""

    init_info_cls = IPCTrainerInitInfo
    consumes = "full"

    _feed: Feed | None = None
    _outgoing: Outgoing | None = None
    _prepared: Prepared | None = None
    _path = "shared memory"

    @classmethod
    def trainer_init(
        cls,
        init_info: IPCTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """See `TrainerWeightTransferEngine.trainer_init`; with `wire="vllm"` an engine that speaks vLLM's."""
        if init_info.wire == "vllm":
            return cast(Self, StockIPCTrainer.trainer_init(init_info, client=client, source=source))
        return super().trainer_init(init_info, client=client, source=source)

    def _configure(self, info: IPCTrainerInitInfo) -> None:
        super()._configure(info)
        device = self._device()
        if info.memory == "device" and device.type != "cuda":
            raise MessageError(f"memory='device' needs weights on a GPU, and these are on {device}: leave it out")

    def worker_init_info(self) -> dict[str, Any]:
        """The reference's field."""
        return {"packed": self.init_info.packed}

    @property
    def path(self) -> str:
        """The way the bytes of the last round took."""
        return self._path

    @property
    def _memory(self) -> Literal["host", "device"]:
        """Which memory the bytes go through."""
        if self.init_info.memory is not None:
            return self.init_info.memory
        return "device" if self._device().type == "cuda" and not self.init_info.adopt else "host"

    def _gpu(self) -> str | None:
        return device_uuid(self._device()) if self._memory == "device" else None

    def link_options(self) -> dict[str, Any]:
        """Which memory the bytes go through."""
        return {"memory": self._memory}

    def connect(self, deadline: Deadline) -> None:
        """Have every worker come to the doorways of the senders.

        Raises:
            HandshakeError: A worker is on another host, or of another user.
        """
        assert self.rendezvous is not None
        install()
        if self._outgoing is None:
            self._outgoing = Outgoing(self.reader.owned, self.rank)
        sends = self.rank in self.fleet.senders
        doorway = Doorway(self.init_info.socket_directory) if sends else None
        try:
            place = {**identity(), "gpu": self._gpu()}
            payload = {"door": doorway.address if doorway else None, "place": place}
            met = self.rendezvous.exchange("ipc-doors", deadline=deadline, payload=payload, gather=True)
            met.raise_failed()
            workers = {rank: one for rank, one in met.payloads.items() if rank >= self.fleet.trainers}
            for rank, one in workers.items():
                on_device = apart_on_device(place, one["place"]) if self._memory == "device" else None
                if reason := apart(place, one["place"]) or on_device:
                    raise HandshakeError(f"{self.rendezvous.label(rank)}: {reason}", transport=self.backend)
            if doorway is not None:
                labels = {rank: self.rendezvous.label(rank) for rank in workers}
                channels = doorway.admit(labels, secret=self._members.secret, deadline=deadline)
                self._feed = Feed(
                    channels,
                    slot_bytes=self.init_info.buffer_bytes(self._memory),
                    count=self.init_info.packed_num_buffers,
                    device=self._device() if self._memory == "device" else torch.device("cpu"),
                )
        finally:
            if doorway is not None:
                doorway.close()
        faults.reach("ipc.connected")

    def prepare_round(self) -> None:
        """Look at the source, if it is there all at once: a pass over all parameters."""
        source = self.present() if self._feed is not None else None
        if source is not None and self._outgoing is not None:
            self._prepared = self._outgoing.prepare(source, self.init_info, self._memory)

    def end_round(self) -> None:
        """Let optimizers go on."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.guard.end()

    def transmit(self, number: int, deadline: Deadline) -> int:
        """Bring this rank's parameters to all workers; iterate the rest so that gathers line up."""
        sent = 0
        checksums = Checksums(enabled=self.init_info.checksum)
        if self._feed is None:
            for _ in self.batches():
                deadline.check()
        else:
            assert self._outgoing is not None
            sending = Sending(
                self._outgoing, self._feed, self.init_info, self._memory, checksums, self._progress, deadline
            )
            sent = sending.run(self._prepared, self.batches(), number)
            self._path = sending.path
        if self.init_info.checksum:
            assert self.rendezvous is not None
            self.rendezvous.exchange(
                f"checksum-{number}", deadline=deadline, payload=checksums.values, gather=True
            ).raise_failed()
        return sent

    def _progress(self, place: int, sent: int) -> None:
        if self.on_progress is not None:
            assert self._outgoing is not None
            event = ProgressEvent(
                phase="transfer",
                parameter=self.metadata[place].name,
                parameters_done=place + 1,
                parameters=len(self.metadata),
                bytes_done=sent,
                bytes=self._outgoing.nbytes,
            )
            self.on_progress(event)

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Hang up. Workers keep what they have adopted, and it is not written while they do."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    def shutdown(self) -> None:
        """Leave the workers, and give the exported segments up."""
        super().shutdown()
        if self._outgoing is not None:
            self._outgoing.close()
