"""Copies of the template transport `disk`, each broken in one way, registered at run time in every process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from weightwire.deadline import Deadline
from weightwire.errors import Unsupported
from weightwire.layout import ParamMeta
from weightwire.messages import WeightTransferUpdateInfo
from weightwire.registry import WeightTransferEngineFactory, WeightTransferTrainerFactory

TEMPLATE = Path(__file__).parents[2] / "docs" / "template" / "src"
if str(TEMPLATE) not in sys.path:
    sys.path.append(str(TEMPLATE))

from weightwire_disk.engine import DiskWeightTransferEngine  # noqa: E402 - the template is not installed
from weightwire_disk.messages import DiskTrainerInitInfo  # noqa: E402
from weightwire_disk.trainer import DiskTrainerWeightTransferEngine  # noqa: E402

Pairs = list[tuple[str, Tensor]]


class TakingSink:
    """A sink whose `load` goes through `take`; everything else is the sink's own."""

    def __init__(self, sink: Any, take: Callable[[Any, Pairs], None]) -> None:
        self._sink, self._take = sink, take

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self._take(self._sink, [(name, tensor.clone()) for name, tensor in pairs])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)


class TakingEngine(DiskWeightTransferEngine):
    """A worker's engine that does something else with what it has read."""

    @property
    def sink(self) -> Any:
        return TakingSink(super().sink, self.take)

    def take(self, sink: Any, pairs: Pairs) -> None:
        sink.load(pairs)


class LosesATensor(TakingEngine):
    def take(self, sink: Any, pairs: Pairs) -> None:
        sink.load(pairs[:-1])
        sink.targets([pairs[-1][0]])
        sink.received([pairs[-1][0]])


class SwapsTwo(TakingEngine):
    def take(self, sink: Any, pairs: Pairs) -> None:
        (one, first), *_, (other, last) = [pair for pair in pairs if pair[1].shape == pairs[0][1].shape]
        swapped = {one: last, other: first}
        sink.load([(name, swapped.get(name, tensor)) for name, tensor in pairs])


class IgnoresTheDeadline(DiskWeightTransferEngine):
    @property
    def deadline(self) -> Deadline:
        return Deadline(30.0)


class LeaksADescriptor(DiskWeightTransferEngine):
    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        os.open(os.devnull, os.O_RDONLY)
        super().receive_weights(update_info)


def write_live(sink: Any, pairs: Pairs) -> None:
    live = dict(sink.model.named_parameters())
    for name, tensor in pairs:
        live[name].data.copy_(tensor)


class CommitsEarly(TakingEngine):
    def take(self, sink: Any, pairs: Pairs) -> None:
        sink.load(pairs)
        write_live(sink, pairs)


class TearsOnAbort(TakingEngine):
    _last: tuple[Any, Pairs] | None = None

    def take(self, sink: Any, pairs: Pairs) -> None:
        self._last = sink, pairs
        sink.load(pairs)

    def disconnect(self, *, error: BaseException | None = None) -> None:
        if error is not None and self._last is not None:
            sink, pairs = self._last
            write_live(sink, pairs[: len(pairs) // 2])
        super().disconnect(error=error)


class ReturnsBeforeTheBytes(TakingEngine):
    def take(self, sink: Any, pairs: Pairs) -> None:
        targets = sink.targets([name for name, _ in pairs])
        sink.received(list(targets))
        model = sink.model

        def arrive() -> None:
            time.sleep(0.3)
            live = dict(model.named_parameters())
            for name, tensor in pairs:
                live[name].data.copy_(tensor)

        threading.Thread(target=arrive, daemon=True).start()


class WrongDtype(DiskTrainerWeightTransferEngine):
    def pairs(self) -> Iterator[tuple[ParamMeta, Tensor]]:
        for meta, tensor in super().pairs():
            yield meta, tensor.to(torch.bfloat16).to(meta.dtype) if meta.dtype == torch.float32 else tensor


class StaleBuffer(TakingEngine):
    _first: Pairs | None = None

    def take(self, sink: Any, pairs: Pairs) -> None:
        self._first = self._first or pairs
        sink.load([*pairs[:-1], self._first[-1]])


class SwallowsTheError(DiskTrainerWeightTransferEngine):
    def pairs(self) -> Iterator[tuple[ParamMeta, Tensor]]:
        came: set[str] = set()
        try:
            for meta, tensor in super().pairs():
                came.add(meta.name)
                yield meta, tensor
        except RuntimeError:
            for meta in self.metadata:
                if meta.name not in came:
                    yield meta, torch.zeros(meta.shape, dtype=meta.dtype)


class SenderIgnoresTheDeadline(DiskTrainerWeightTransferEngine):
    def transmit(self, number: int, deadline: Deadline) -> int:
        return super().transmit(number, Deadline(30.0))


class OneSenderOnly(DiskTrainerWeightTransferEngine):
    def connect(self, deadline: Deadline) -> None:
        if self.fleet.senders != (0,):
            raise Unsupported("only trainer rank 0 sends")
        super().connect(deadline)


class OtherSendersLost(DiskTrainerWeightTransferEngine):
    """As if it could: what another rank owns is made up by rank 0."""

    def _first_owned(self) -> Iterator[tuple[ParamMeta, Tensor]]:
        if self.rank == 0:
            mine = {meta.name: tensor for meta, tensor in self.pairs()}
            for meta in self.metadata:
                yield meta, mine.get(meta.name, torch.zeros(meta.shape, dtype=meta.dtype))


TRAINERS: dict[str, type[Any]] = {
    "swallows_the_error": SwallowsTheError,
    "sender_ignores_the_deadline": SenderIgnoresTheDeadline,
    "wrong_dtype": WrongDtype,
    "one_sender_only": OneSenderOnly,
    "other_senders_lost": OtherSendersLost,
}
WORKERS: dict[str, type[Any]] = {
    "loses_a_tensor": LosesATensor,
    "swaps_two": SwapsTwo,
    "ignores_the_deadline": IgnoresTheDeadline,
    "leaks_a_descriptor": LeaksADescriptor,
    "commits_early": CommitsEarly,
    "tears_on_abort": TearsOnAbort,
    "returns_before_the_bytes": ReturnsBeforeTheBytes,
    "stale_buffer": StaleBuffer,
}


def register() -> None:
    """Register all of them, and the template itself as `whole`."""
    for name in ("whole", *TRAINERS, *WORKERS):
        info = type(
            f"Info_{name}", (DiskTrainerInitInfo,), {"backend": name, "__annotations__": {"backend": ClassVar[str]}}
        )
        trainer = TRAINERS.get(name, DiskTrainerWeightTransferEngine)
        made = type(f"Trainer_{name}", (trainer,), {"init_info_cls": info})
        WeightTransferTrainerFactory.register_engine(name, made)
        WeightTransferEngineFactory.register_engine(name, WORKERS.get(name, DiskWeightTransferEngine))
