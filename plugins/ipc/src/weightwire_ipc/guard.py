"""Keeps the weights that are being sent as they are, or notices that they were not.

Optimizers, which write every parameter, wait until the weights have been read. Any other write in place moves a
tensor's version counter, and the round fails. What torch cannot show (a write through `.data`, or an operation of
another thread that is still running when the counters are looked at) the optional checksum finds.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from weightwire.errors import OrderError, TransferError

_version = operator.attrgetter("_version")
_changed = threading.Condition()
_guards: list[Guard] = []
_stepping: dict[int, tuple[int, Optimizer]] = {}
_installed = False


def install() -> None:
    """Have optimizers ask from now on; an optimizer that steps already is not known."""
    global _installed
    with _changed:
        if not _installed:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _installed = True


class Guard:
    """Has tensors stay as they are from now until `end`: optimizers wait for it. For one thread.

    Args:
        tensors: What must not change.

    Raises:
        TransferError: An optimizer of another thread is in the midst of writing.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        install()
        self._thread = threading.get_ident()
        self._tensors = tensors
        self._places: set[int] | None = None  # asked for only where an optimizer steps meanwhile
        self._counting: list[torch.Tensor] = []
        self._versions: list[int] = []
        with _changed:
            for key, (thread, optimizer) in list(_stepping.items()):
                if thread != self._thread and self._concerns(optimizer):
                    # Its step may have raised, which nobody tells: it is reported once.
                    del _stepping[key]
                    raise _mixed("an optimizer was stepping in another thread when they began to be sent")
            _guards.append(self)

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note how often some of the tensors have been written; before anybody reads them, each once."""
        try:
            versions = list(map(_version, tensors))
        except RuntimeError:  # those of inference mode do not count
            tensors = [tensor for tensor in tensors if not tensor.is_inference()]
            versions = list(map(_version, tensors))
        self._counting += tensors
        self._versions += versions

    def check(self) -> None:
        """Compare with what was noted.

        Raises:
            TransferError: One was written all the same.
        """
        now = list(map(_version, self._counting))
        if now != self._versions:
            count = sum(map(operator.ne, now, self._versions))
            raise _mixed(f"{count} of {len(now)} were written in place meanwhile")

    def end(self) -> None:
        """Let optimizers go on; idempotent."""
        with _changed:
            if self in _guards:
                _guards.remove(self)
                _changed.notify_all()

    def _concerns(self, optimizer: Optimizer) -> bool:
        if self._places is None:
            self._places = set(map(torch.Tensor.data_ptr, self._tensors))
        places = self._places
        return any(
            isinstance(parameter, torch.Tensor) and parameter.data_ptr() in places
            for group in optimizer.param_groups
            for parameter in group["params"]
        )


def _mixed(why: str) -> TransferError:
    words = "do not step or write the weights before send_weights returns"
    return TransferError(f"the weights changed while they were being sent: {why}; {words}", transport="ipc")


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    mine = threading.get_ident()
    with _changed:
        while concerned := [one for one in _guards if one._concerns(optimizer)]:
            if any(one._thread == mine for one in concerned):
                raise OrderError("an optimizer steps in the thread that is sending the weights it writes")
            _changed.wait()  # a guard ends with its round, which has a deadline
        _stepping[id(optimizer)] = (mine, optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with _changed:
        _stepping.pop(id(optimizer), None)
