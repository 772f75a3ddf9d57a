"""Keeps the weights that are being sent as they are, or notices that they were not.

Optimizers, which write every parameter, wait until the weights have been read. Any other write in place moves a
tensor's version counter, and the round fails. What torch cannot show (a write through `.data`, or an operation of
another thread that is still running when the counters are looked at) the optional checksum finds.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from weightwire.errors import OrderError, TransferError

_version = operator.attrgetter("_version")
_changed = threading.Condition()
_readings: list[_Reading] = []
_stepping: dict[int, tuple[int, Optimizer]] = {}
_installed = False


class _Reading:
    """Tensors that must not change now, and the thread that sends them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.thread = threading.get_ident()
        self._tensors = tensors
        self._places: set[int] | None = None  # asked for only where an optimizer steps meanwhile

    def concerns(self, optimizer: Optimizer) -> bool:
        if self._places is None:
            self._places = set(map(torch.Tensor.data_ptr, self._tensors))
        places = self._places
        return any(
            isinstance(parameter, torch.Tensor) and parameter.data_ptr() in places
            for group in optimizer.param_groups
            for parameter in group["params"]
        )


@contextmanager
def unchanged(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have `tensors` stay as they are while the block runs: optimizers wait for its end.

    Raises:
        TransferError: One was written all the same, or an optimizer of another thread was in the midst of writing.
    """
    global _installed
    reading = _Reading(tensors)
    with _changed:
        if not _installed:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _installed = True
        for key, (thread, optimizer) in list(_stepping.items()):
            if thread != reading.thread and reading.concerns(optimizer):
                # Its step may have raised, which nobody tells: it is reported once.
                del _stepping[key]
                raise _mixed("an optimizer was stepping in another thread when they began to be sent")
        tracked, versions = _versions(tensors)
        _readings.append(reading)
    try:
        yield
    finally:
        with _changed:
            _readings.remove(reading)
            _changed.notify_all()
    if list(map(_version, tracked)) != versions:
        count = sum(map(operator.ne, map(_version, tracked), versions))
        raise _mixed(f"{count} of {len(tracked)} were written in place meanwhile")


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], list[int]]:
    """The tensors that count their versions, which those of inference mode do not, and the counts."""
    try:
        return tensors, list(map(_version, tensors))
    except RuntimeError:
        counting = [tensor for tensor in tensors if not tensor.is_inference()]
        return counting, list(map(_version, counting))


def _mixed(why: str) -> TransferError:
    words = "do not step or write the weights before send_weights returns"
    return TransferError(f"the weights changed while they were being sent: {why}; {words}", transport="ipc")


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    mine = threading.get_ident()
    with _changed:
        while concerned := [one for one in _readings if one.concerns(optimizer)]:
            if any(one.thread == mine for one in concerned):
                raise OrderError("an optimizer steps in the thread that is sending the weights it writes")
            _changed.wait()  # a reading ends with its round, which has a deadline
        _stepping[id(optimizer)] = (mine, optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with _changed:
        _stepping.pop(id(optimizer), None)
