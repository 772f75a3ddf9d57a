"""The outcome of a benchmark, and the machine it was taken on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightwire import __version__

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way of one case.

    Attributes:
        case: Name of the case.
        name: Name of the way.
        nbytes: Size of the payload in bytes.
        seconds: Each timed round, from the first rank's begin to the last rank's end.
        bit_equal: Whether every round, warm-up too, left the same bytes on all ranks.
        peak_memory: Process -> resident bytes `idle` (before it held the payload) and `peak` (during a step), taken
            in processes that do nothing else; empty if it was not measured.
        extras: What the way itself reported; medians of numbers.
    """

    case: str
    name: str
    nbytes: int
    seconds: list[float]
    bit_equal: bool
    peak_memory: dict[str, dict[str, int]] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Median of the rounds, in seconds."""
        return statistics.median(self.seconds)

    @property
    def gib_per_second(self) -> float:
        """Payload over the median round, in GiB/s (each receiver gets the whole payload in that time)."""
        return self.nbytes / GIB / self.median

    def to_json(self) -> dict[str, Any]:
        """The record as JSON types."""
        return {
            "case": self.case,
            "name": self.name,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "median_seconds": self.median,
            "gib_per_second": self.gib_per_second,
            "peak_memory": self.peak_memory,
            "bit_equal": self.bit_equal,
            "extras": self.extras,
        }


@dataclass(slots=True, kw_only=True)
class Report:
    """All runs of one benchmark.

    Attributes:
        transport: Backend name.
        machine: Where it was measured.
        payload: Case -> its payload.
        runs: One for each way of each case.
        ratios: `transport.case.reference` -> our speed over the reference's.
    """

    transport: str
    machine: dict[str, Any]
    payload: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def bit_equal(self) -> bool:
        """Whether every run was."""
        return all(run.bit_equal for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {
            "transport": self.transport,
            "weightwire": __version__,
            "machine": self.machine,
            "payload": self.payload,
            "runs": [run.to_json() for run in self.runs],
            "ratios": self.ratios,
        }


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, kernel, versions, load and time."""
    import torch

    return {
        "processor": _line("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _line(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _chosen(path: str) -> str:
    """The bracketed word of a kernel setting."""
    file = Path(path)
    text = file.read_text() if file.exists() else ""
    return text.partition("[")[2].partition("]")[0]
