"""Benchmark of whole rounds into real vLLM servers: weightwire's against an engine that does it tensor by tensor.

Both servers run at once and rounds are interleaved. Before each round every weight changes; afterwards both servers
must answer with the same greedy tokens, other ones than before. Kernels keep weights in forms of their own, so that
bytes cannot be compared.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from weightwire.clients.http import HTTPVLLMWeightSyncClient
from weightwire.registry import WeightTransferTrainerFactory, engine_class
from weightwire.source import ModuleSource
from weightwire.testing.measure import Options, Report, Run
from weightwire.testing.measure_report import machine
from weightwire_vllm.bench_model import make_checkpoint
from weightwire_vllm.bench_per_tensor import BACKEND, PerTensorTrainer
from weightwire_vllm.bench_server import ProcessMemory, Server

CASES: Final = {"round": "nccl", "ipc_round": "ipc"}
"""The transport of each case."""


def run(options: Options, cases: Sequence[str] | None, progress: Callable[[str], None]) -> Report:
    """Measure `cases`, all if None.

    Returns:
        With the ratios `vllm.round.per_tensor` and `vllm.ipc_round.per_tensor`, and for each of weightwire's runs how
        much memory the worker took in the first update beyond the weights it staged (`beyond_staging_bytes`).
    """
    report = Report(transport="vllm", machine=machine())
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightwire-bench-")))
        progress("making a checkpoint")
        model = make_checkpoint(folder, nbytes=options.nbytes)
        progress("starting two vLLM servers")
        hosted = Server(folder, "weightwire")
        stack.callback(hosted.stop)
        naive = Server(folder, BACKEND, environment={"WEIGHTWIRE_VLLM_BENCH": "1"})
        stack.callback(naive.stop)
        hosted.wait_until_healthy(300.0)
        naive.wait_until_healthy(300.0)
        port = _free_port()
        per_tensor = PerTensorTrainer(naive.client, model, port)
        for case in cases or CASES:
            measured = _Comparison(case, model, hosted, naive, per_tensor)
            report.runs += measured.run(options, progress)
            subject, other = report.runs[-2:]
            report.payload[case] = {"name": "Qwen2 of half a billion parameters", "bytes": subject.nbytes}
            report.ratios[f"vllm.{case}.per_tensor"] = other.median / subject.median
    return report


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Comparison:
    """Interleaved rounds into both servers.

    Args:
        case: Its name.
        model: The trainer's.
        hosted: The server with weightwire.
        naive: The other.
        per_tensor: The trainer that is linked to the other.
    """

    def __init__(
        self, case: str, model: nn.Module, hosted: Server, naive: Server, per_tensor: PerTensorTrainer
    ) -> None:
        self._case, self._model, self._per_tensor = case, model, per_tensor
        self._servers = {"weightwire": hosted, "per_tensor": naive}
        self._seconds: dict[str, list[float]] = {name: [] for name in self._servers}
        self._memory: dict[str, dict[str, dict[str, int]]] = {}
        self._own_memory = ProcessMemory(os.getpid())
        self._extras: dict[str, float] = {}
        self._equal = True
        self._nbytes = sum(parameter.nbytes for parameter in model.parameters())

    def run(self, options: Options, progress: Callable[[str], None]) -> list[Run]:
        trainer = self._trainer(self._servers["weightwire"].client)
        send: dict[str, Callable[[], Any]] = {
            "weightwire": lambda: trainer.send_weights(pause="keep", weight_version="bench"),
            "per_tensor": self._per_tensor.send,
        }
        before = self._answers()
        try:
            for number in range(options.warmup + options.rounds):
                progress(f"{self._case}: round {number + 1} of {options.warmup + options.rounds}")
                self._change(number)
                names = sorted(send, reverse=bool(number % 2))
                for name in names:
                    self._timed(name, send[name])
                answers = self._answers()
                self._equal &= len(set(answers)) == 1 and not set(answers) & set(before)
                before = answers
        finally:
            trainer.shutdown()
        return [self._run_of(name, options.warmup) for name in self._servers]

    def _trainer(self, client: HTTPVLLMWeightSyncClient) -> Any:
        info = engine_class("trainer", CASES[self._case]).init_info_cls()
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(self._model))

    def _change(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in self._model.parameters():
                if parameter.ndim > 1:
                    # As random as before; noise that adds up would end in one answer to everything.
                    parameter.copy_(parameter.roll(1, 0))
                else:
                    parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.01)

    def _timed(self, name: str, send: Callable[[], Any]) -> None:
        server = self._servers[name]
        processes = {"sender": self._own_memory, "receiver": server.memory}
        for memory in processes.values():
            memory.begin()
        began = time.perf_counter()
        report = send()
        self._seconds[name].append(time.perf_counter() - began)
        self._memory.setdefault(name, {kind: memory.end() for kind, memory in processes.items()})
        if report is not None:
            worker = next(rank for rank in report.ranks if "commit" in rank.seconds)
            self._extras = {f"{phase}_seconds": value for phase, value in worker.seconds.items()}

    def _answers(self) -> list[tuple[int, ...]]:
        return [server.greedy_tokens() for server in self._servers.values()]

    def _run_of(self, name: str, warmup: int) -> Run:
        seconds, memory = self._seconds[name][warmup:], self._memory[name]
        extras: dict[str, Any] = {}
        if name == "weightwire":
            taken = memory["receiver"]["peak"] - memory["receiver"]["idle"]
            extras = {**self._extras, "beyond_staging_bytes": taken - self._nbytes}
        return Run(
            case=self._case,
            name=name,
            nbytes=self._nbytes,
            seconds=seconds,
            bit_equal=self._equal,
            peak_memory=memory,
            extras=extras,
        )
