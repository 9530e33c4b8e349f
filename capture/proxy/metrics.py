"""The proxy's Prometheus metrics, `inferloop:proxy_*`.

Latencies are those seen at the proxy; failed requests count in durations only. Percentiles for
people come from the trace, not from these buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from capture.mirroring.mirror_metrics import Counting, MirrorCollector

if TYPE_CHECKING:
    from capture.proxy.answer import Answer
    from capture.proxy.observation import Timeline
    from capture.proxy.outcome import Verdict
    from capture.proxy.trace import ProxyTrace

OVERHEAD_BUCKETS = (
    0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.05,
)  # fmt: skip
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
GAP_BUCKETS = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
DURATION_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
HELD_AT_ONCE = 4096
"""Overheads that are counted together, which costs a tenth of one after the other."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class WeightedHistogram(Collector):
    """A histogram that takes many values in one call, each counted several times."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name, self._text = name, text
        self._bounds = np.array(buckets)
        self._counts = np.zeros(len(buckets) + 1, np.int64)
        self._sum = 0.0

    def observe(self, values: np.ndarray, times: np.ndarray) -> None:
        """Count each of `values` (in the metric's unit) as often as `times` says."""
        places = np.searchsorted(self._bounds, values)
        np.add.at(self._counts, places, times)
        self._sum += float((values * times).sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets=buckets, sum_value=self._sum)
        yield family


class ProxyMetrics:
    """All metrics of one proxy, in a registry of their own. Times are passed in seconds."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "inferloop:proxy_requests", "Requests that were forwarded, by what the client saw.",
            ["endpoint", "status", "error_type"], registry=registry,
        )  # fmt: skip
        self._duration = Histogram(
            "inferloop:proxy_request_duration_seconds", "From a request's head to its end.",
            ["endpoint"], buckets=DURATION_BUCKETS, registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge(
            "inferloop:proxy_requests_in_flight", "Requests being forwarded.", registry=registry
        )
        self._held_ns: list[int] = []
        self._overhead = WeightedHistogram(
            "inferloop:proxy_overhead_seconds",
            "From the upstream's bytes being read to their being handed to the client's socket.",
            OVERHEAD_BUCKETS,
        )
        self._skipped = Counter(
            "inferloop:proxy_capture_skipped", "Requests whose content was not captured, by why.",
            ["reason"], registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            "inferloop:proxy_generation_tokens", "Output tokens, by what they were counted by.",
            ["counted_by"], registry=registry,
        )  # fmt: skip
        self._ttft = Histogram(
            "inferloop:proxy_time_to_first_token_seconds", "Arrival to the first token.",
            buckets=TTFT_BUCKETS, registry=registry,
        )  # fmt: skip
        self._tpot = Histogram(
            "inferloop:proxy_request_time_per_output_token_seconds",
            "(last - first) / (tokens - 1).", buckets=GAP_BUCKETS, registry=registry,
        )  # fmt: skip
        self._itl = WeightedHistogram(
            "inferloop:proxy_inter_token_latency_seconds",
            "Time per token: a chunk of k tokens counts as k equal steps.", GAP_BUCKETS,
        )  # fmt: skip
        self._gaps = WeightedHistogram(
            "inferloop:proxy_chunk_gap_seconds", "Time between an answer's chunks.", GAP_BUCKETS
        )
        registry.register(self._overhead)
        registry.register(self._itl)
        registry.register(self._gaps)

    def served(self, endpoint: str, status: int, error_type: str, duration_s: float) -> None:
        """A request's end on the wire; `status` 0: the client was told nothing."""
        self.in_flight.dec()
        self._requests.labels(endpoint, str(status), error_type).inc()
        self._duration.labels(endpoint).observe(duration_s)

    def held(self, spent_ns: int) -> None:
        """How long a piece of an answer was in the proxy."""
        self._held_ns.append(spent_ns)
        if len(self._held_ns) >= HELD_AT_ONCE:
            self._count_held()

    def answered(self, time: Timeline, answer: Answer, verdict: Verdict) -> None:
        """The end of a captured request, once its answer was read."""
        if answer.output_tokens:
            self._tokens.labels(answer.counted_by).inc(answer.output_tokens)
        if not verdict.succeeded or not time.first_ns:
            return
        self._ttft.observe((time.first_ns - time.arrival_ns) / 1e9)
        if answer.output_tokens > 1:
            spent_s = (time.last_ns - time.first_ns) / 1e9
            self._tpot.observe(spent_s / (answer.output_tokens - 1))
        if time.gaps:
            gap_ns, tokens = np.array(time.gaps.ns), np.array(time.gaps.tokens)
            self._itl.observe(gap_ns / 1e9 / tokens, tokens)
            self._gaps.observe(gap_ns / 1e9, np.ones(len(tokens), np.int64))

    def skipped(self, reason: str) -> None:
        self._skipped.labels(reason).inc()

    def watch_trace(self, trace: ProxyTrace) -> None:
        """Show whether tracing goes on."""
        failed = Gauge(
            "inferloop:proxy_trace_failed", "1: the trace was given up, the log says why.",
            registry=self.registry,
        )  # fmt: skip
        failed.set_function(lambda: float(trace.failure not in (None, trace.OFF)))

    def watch_mirror(self, mirror: Counting) -> None:
        """Show the mirror's counters."""
        self.registry.register(MirrorCollector(mirror, "inferloop:proxy_mirror", {}))

    def exposition(self) -> bytes:
        self._count_held()
        return generate_latest(self.registry)

    def _count_held(self) -> None:
        times = np.ones(len(self._held_ns), np.int64)
        self._overhead.observe(np.array(self._held_ns, np.float64) / 1e9, times)
        self._held_ns.clear()
