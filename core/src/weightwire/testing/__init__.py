"""What tests of weightwire and of transports stand on: a conformance kit, warm rank processes, faults, measurements.

A leaf: nothing outside tests and benchmarks imports it. `TransportConformance` and the fixtures need the extra
`weightwire[testing]`; everything here is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from weightwire.testing.conformance.judging import Nonconforming as Nonconforming
    from weightwire.testing.conformance.subject import TransportUnderTest as TransportUnderTest
    from weightwire.testing.conformance.suite import TransportConformance as TransportConformance
    from weightwire.testing.pool import Rank as Rank
    from weightwire.testing.pool import RankPool as RankPool
    from weightwire.testing.workers import RankClient as RankClient
    from weightwire.testing.workers import host_workers as host_workers

_MODULES: Final = {
    "Nonconforming": "conformance.judging",
    "Rank": "pool",
    "RankClient": "workers",
    "RankPool": "pool",
    "TransportConformance": "conformance.suite",
    "TransportUnderTest": "conformance.subject",
    "host_workers": "workers",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
