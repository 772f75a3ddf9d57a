"""The worker's side: reads what the senders of this host have handed over, or computes on it from now on."""

from __future__ import annotations

import logging
from typing import Any

from weightwire import faults
from weightwire.checksums import Checksums
from weightwire.deadline import Deadline
from weightwire.engine import WeightTransferEngine
from weightwire.errors import HandshakeError
from weightwire.layout import ParamMeta
from weightwire.link import Link
from weightwire.sink import UpdateSpec
from weightwire_ipc.channel import wait_any
from weightwire_ipc.device import device_uuid
from weightwire_ipc.doorway import knock
from weightwire_ipc.host import apart_on_device, identity
from weightwire_ipc.intake import Intake
from weightwire_ipc.landing import Landing
from weightwire_ipc.messages import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
from weightwire_ipc.stock_reception import StockReception, refuse_without_gpu

_log = logging.getLogger(__name__)


class IPCWeightTransferEngine(WeightTransferEngine[IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo]):
    """Takes dense weights from the trainer ranks of this host."""

    init_info_cls = IPCWeightTransferInitInfo
    update_info_cls = IPCWeightTransferUpdateInfo
    # Only the thread that receives writes to the sink's memory.
    writes_after_failure = False

    _intakes: list[Intake] | None = None
    _names: list[str]
    _stock: StockReception | None = None
    _strays: list[str] | None = None

    def connect(self, init_info: IPCWeightTransferInitInfo, deadline: Deadline) -> None:
        """Come to every sender's doorway.

        Raises:
            HandshakeError: A sender's memory cannot be had here; says why and what to do.
        """
        link = self.link
        if link is None:
            refuse_without_gpu(self.device)
            self._stock = StockReception(self.device)
            return
        place = {**identity(), "gpu": device_uuid(self.device) if self.device.type == "cuda" else None}
        met = link.gather("ipc-doors", deadline, {"place": place})
        self._names = [meta.name for meta in link.metadata]
        self._intakes = []
        for sender in link.info.senders:
            if link.info.options.get("memory") == "device" and (why := apart_on_device(met[sender]["place"], place)):
                raise HandshakeError(f"{link.rendezvous.label(sender)}: {why}", transport=self.backend)
            channel = knock(
                met[sender]["door"],
                peer=link.rendezvous.label(sender),
                member=link.rendezvous.rank,
                secret=bytes.fromhex(link.info.secret),
                trainer=met[sender]["place"],
                deadline=deadline,
            )
            self._intakes.append(Intake(channel, _rows_of(sender, link), self.device))
        faults.reach("ipc.connected")

    def receive_weights(self, update_info: IPCWeightTransferUpdateInfo) -> None:
        """Read, or adopt, everything that the senders have.

        Raises:
            TransferError: Not initialised.
            PeerLost: A sender is gone.
        """
        if update_info.stock:
            self._stock_reception().receive(self.sink, update_info)
            return
        link = self.link
        if link is None or self._intakes is None or update_info.round is None:
            raise self.not_initialised()
        if update_info.metadata is not None:
            raise HandshakeError("an update over ipc brings the parameters of init", transport=self.backend)
        self._report_strays()
        checksums = Checksums(enabled=link.info.checksum)
        landing = Landing(self.sink, self._names, self.device, checksums, self.deadline)
        for intake in self._intakes:
            intake.expect(update_info.round, landing)
        reading = list(self._intakes)
        while reading := [one for one in reading if not one.advance(self.deadline)]:
            ready = [channel for one in reading for channel in one.waits_for()]
            wait_any(ready, self.deadline, f"{reading[0].channel.peer} to send")
        if link.info.checksum:
            sent = link.gather(f"checksum-{update_info.round}", self.deadline)
            for sender in link.info.senders:
                checksums.compare(sent[sender], lambda place: [link.metadata[place].name], transport=self.backend)

    def update_spec(self, update_info: IPCWeightTransferUpdateInfo) -> UpdateSpec:
        """See `WeightTransferEngine.update_spec`; of a stock message, what it names."""
        if update_info.stock:
            return self._stock_reception().spec(self.sink, update_info)
        return super().update_spec(update_info)

    def start_weight_update(self) -> None:
        """Prepare for a new update."""
        if self._stock is not None:
            self._stock.start()
        super().start_weight_update()

    def drain_pending(self) -> None:
        """Bring into the sink what a stock trainer's packed messages have left to the end."""
        if self._stock is not None and self.driven:
            self._stock.finish(self.sink)

    def _stock_reception(self) -> StockReception:
        if self._stock is None:
            raise self.not_initialised()
        return self._stock

    def _report_strays(self) -> None:
        self._strays = sorted({name for one in self._intakes or () for name in one.strays()})
        if self._strays:
            _log.warning(
                "%d adopted parameters were written in this process (%s ...): the trainer's weights come back with "
                "the next update; use Worker(commit='copy') for a model that writes its own parameters",
                len(self._strays),
                ", ".join(self._strays[:3]),
            )

    def report_details(self) -> dict[str, Any]:
        """Parameters of adopted memory that were written here since the round before, if there were any."""
        return {"strays": self._strays} if self._strays else {}

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Hang up; what was adopted stays where it is."""
        stock, self._stock = self._stock, None
        if stock is not None:
            stock.close()
        intakes, self._intakes = self._intakes, None
        for intake in intakes or ():
            intake.close()


def _rows_of(sender: int, link: Link) -> list[tuple[int, ParamMeta]]:
    """What a sender sends: place among all parameters, and metadata."""
    return [row for row in enumerate(link.metadata) if row[1].first_owner == sender]
