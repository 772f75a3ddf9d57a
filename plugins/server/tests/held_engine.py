"""A transport without a wire: fills parameters with one value, and stops or fails half-way when it is told to."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from weightwire.deadline import Deadline
from weightwire.engine import WeightTransferEngine
from weightwire.messages import WeightTransferInitInfo, WeightTransferUpdateInfo
from weightwire.registry import WeightTransferEngineFactory


class Brake:
    """Holds an engine's call until `release` or until its deadline is cancelled."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._released = False
        self.ended: list[BaseException] = []

    def hold(self, deadline: Deadline) -> None:
        try:
            with self._changed:
                deadline.wait_for(lambda: self._released, self._changed)
        except BaseException as error:
            self.ended.append(error)
            raise

    def release(self) -> None:
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def arm(self) -> None:
        self._released = False
        self.ended.clear()


brake = Brake()


@dataclass(kw_only=True)
class HeldInitInfo(WeightTransferInitInfo):
    hold: bool = False


@dataclass(kw_only=True)
class HeldUpdateInfo(WeightTransferUpdateInfo):
    value: float = 1.0
    hold: bool = False
    fail: str | None = None
    skip: str | None = None


class HeldEngine(WeightTransferEngine[HeldInitInfo, HeldUpdateInfo]):
    init_info_cls = HeldInitInfo
    update_info_cls = HeldUpdateInfo

    def connect(self, init_info: HeldInitInfo, deadline: Deadline) -> None:
        if init_info.hold:
            brake.hold(deadline)

    def receive_weights(self, update_info: HeldUpdateInfo) -> None:
        for place, meta in enumerate(self.update_metadata(update_info)):
            if place == 1 and update_info.hold:
                brake.hold(self.deadline)
            if place == 1 and update_info.fail is not None:
                raise RuntimeError(update_info.fail)
            if meta.name != update_info.skip:
                self.sink.load([(meta.name, torch.full(meta.shape, update_info.value, dtype=meta.dtype))])


WeightTransferEngineFactory.register_engine("held", HeldEngine)
