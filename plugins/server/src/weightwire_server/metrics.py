"""What Prometheus can scrape, under the names that dashboards made for vLLM know.

    vllm:rl_weight_update_operation_duration_seconds{operation}   histogram   seconds of each call, failed ones too
    vllm:rl_weight_update_operations_in_flight{operation}         gauge       calls that run now

`operation` is one of init, shutdown, start, start_draft, update, finish.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, Histogram, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
_BUCKETS = (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)


class OperationMetrics:
    """Durations and numbers of the engine's calls.

    Args:
        registry: Where the metrics are registered; None makes a registry of their own.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._seconds = Histogram(
            "vllm:rl_weight_update_operation_duration_seconds",
            "Duration of weight update operations in seconds.",
            ["operation"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "vllm:rl_weight_update_operations_in_flight",
            "Weight update operations that are running.",
            ["operation"],
            registry=self.registry,
        )

    @contextmanager
    def measured(self, operation: str) -> Iterator[None]:
        """Count what runs inside the with statement as one `operation`."""
        began = time.perf_counter()
        in_flight = self._in_flight.labels(operation)
        in_flight.inc()
        try:
            yield
        finally:
            in_flight.dec()
            self._seconds.labels(operation).observe(time.perf_counter() - began)

    def page(self) -> bytes:
        """Everything in the registry, in Prometheus' text format."""
        return generate_latest(self.registry)
