"""How the ranks of a stock trainer hear of each other: over the default process group, as vLLM's do, no pickle."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, MessageError, describe, error_from_json

Record = dict[str, Any]


class StockGroup:
    """The trainer ranks; alone, it talks to nobody.

    Args:
        count: How many trainer ranks there are.
        rank: This one.
        transport: Backend name, for errors.

    Raises:
        MessageError: Several, and they are not the default process group.
    """

    def __init__(self, count: int, rank: int, *, transport: str) -> None:
        self.count = count
        self.rank = rank
        self._transport = transport
        if count == 1:
            return
        members = distributed.get_world_size() if distributed.is_initialized() else 0
        if members != count:
            raise MessageError(
                f"wire='vllm' with {count} trainer ranks needs torch.distributed's default process group to be "
                f"exactly these ranks; it has {members}"
            )
        # gloo takes tensors of the CPU, NCCL only its own.
        on_cpu = "gloo" in str(distributed.get_backend_config())
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def together(self, step: Callable[[], Record], deadline: Deadline) -> list[Record]:
        """Take a step on every rank; returns what each rank's gave, by rank.

        Args:
            step: This rank's part; gives JSON types.
            deadline: Ends the wait for the others.

        Raises:
            Exception: What this rank's step raised.
            WeightwireError: What another rank's step raised, in its words.
            DeadlineExceeded: A rank did not come.
        """
        try:
            record, error = step(), None
        except Exception as raised:  # noqa: BLE001 - the other ranks hear of it, then it is raised
            record, error = {}, raised
        if self.count == 1:
            if error is not None:
                raise error
            return [record]
        told = None if error is None else self._told(error)
        try:
            answers = [json.loads(answer) for answer in self._gather(json.dumps([record, told]).encode(), deadline)]
        finally:
            if error is not None:
                raise error
        for _, failure in answers:
            if failure is not None:
                raise error_from_json(failure)
        return [answer for answer, _ in answers]

    def _told(self, error: BaseException) -> Record:
        return describe(error, transport=self._transport, rank=f"trainer rank {self.rank}").to_json()

    def _gather(self, data: bytes, deadline: Deadline) -> list[bytes]:
        """The bytes of every rank, by rank."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sizes = [int(size) for size in self._all(torch.tensor([len(data)]), deadline)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = mine
        rows = [row.cpu() for row in self._all(padded, deadline)]
        return [ctypes.string_at(row.data_ptr(), size) for row, size in zip(rows, sizes, strict=True)]

    def _all(self, tensor: torch.Tensor, deadline: Deadline) -> list[torch.Tensor]:
        deadline.check()
        sent = tensor.to(self._device)
        rows = [torch.empty_like(sent) for _ in range(self.count)]
        work = distributed.all_gather(rows, sent, async_op=True)
        assert work is not None
        try:
            work.wait(timedelta(seconds=deadline.remaining()))
        except RuntimeError as error:
            deadline.check("waiting for the other trainer ranks")
            raise DeadlineExceeded(
                f"the other trainer ranks did not answer: {error}", transport=self._transport
            ) from error
        return rows
