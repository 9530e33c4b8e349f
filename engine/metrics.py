"""Prometheus metrics: vLLM's current names under `inferloop:`, and OpenTelemetry's GenAI names.

A registry of its own, so that several engines can live in one process. Percentiles for people
come from the trace, not from these buckets.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.handle import RequestHandle
from engine.histogram import ArrayHistogram
from engine.request import Request
from engine.step import Step

PROVIDER = "inferloop"

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""vLLM's, and finer ones below 10 ms for engines that take a few milliseconds a token."""

REQUEST_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
STEP_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

OTEL_DURATION_BUCKETS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
OTEL_TTFT_BUCKETS = TTFT_BUCKETS[:16]
OTEL_TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class EngineMetrics:
    """All metrics of one engine. Times are passed in seconds, KV use as a share 0..1."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self.labels = {"model_name": model_name, "engine": "0"}
        self._make_counters()
        self._make_histograms()
        self._make_otel()

    def bind(
        self,
        *,
        running: Callable[[], float],
        waiting: Callable[[], float],
        kv_usage: Callable[[], float],
        block_size: int,
        num_blocks: int,
    ) -> None:
        """Connect the gauges, which are read when scraped."""
        for name, text, value in (
            ("num_requests_running", "Requests in the batch.", running),
            ("num_requests_waiting", "Requests waiting to be admitted.", waiting),
            ("kv_cache_usage_perc", "Share of the KV cache held by requests, 0..1.", kv_usage),
        ):
            self.watch(name, text, value)
        config = Gauge(
            "inferloop:cache_config_info",
            "The KV cache, as labels.",
            [*self.labels, "block_size", "num_blocks"],
            registry=self.registry,
        )
        config.labels(**self.labels, block_size=block_size, num_blocks=num_blocks).set(1)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Publish a figure that another part keeps, read when scraped."""
        self._gauge(name, text).set_function(read)

    def step(
        self, step: Step, latency_us: np.ndarray, *, drawn: np.ndarray, gaps: np.ndarray
    ) -> None:
        """A computed step. `latency_us` float [R]; `drawn` and `gaps` bool [R] say which rows drew
        a token, and for which of them the latency is the gap since the previous one."""
        self._iteration_tokens.observe(np.array([step.tokens]))
        self._generation_tokens.inc(int(drawn.sum()))
        rows = np.flatnonzero(gaps)
        self._inter_token_latency.observe(
            latency_us[rows] / 1e6, lambda index: _exemplar(step.requests[rows[index]])
        )

    def admitted(self, request: Request) -> None:
        """A request's first admission; a recomputation after preemption is not counted again."""
        self._prefix_queries.inc(request.prompt_len)
        self._prefix_hits.inc(request.cached_tokens)
        self._prompt_tokens.inc(request.prompt_len)
        self._prompt_tokens_cached.inc(request.cached_tokens)
        self._queue_time.observe((request.admitted_ns - request.arrival_ns) / 1e9)

    def preempted(self) -> None:
        self._preemptions.inc()

    def rejected(self, reason: str) -> None:
        self._rejections.labels(**self.labels, reason=reason).inc()

    def ended(self, handle: RequestHandle) -> None:
        """A request's end in the engine. Only complete answers count in the latencies: a failed
        request's time to its first token would praise the failure."""
        request, reason = handle.request, handle.end_reason
        self._success.labels(**self.labels, finished_reason=reason).inc()
        self._request_prompt.observe(request.prompt_len)
        self._request_generation.observe(request.output_len)
        self._request_max_tokens.observe(request.params.max_tokens)
        if handle.error is not None or not request.first_token_ns:
            return
        exemplar = _exemplar(request)
        ttft_s = (request.first_token_ns - request.arrival_ns) / 1e9
        self._ttft.observe(ttft_s, exemplar)
        prefill_s = (request.first_token_ns - request.admitted_ns) / 1e9
        decode_s = (request.last_token_ns - request.first_token_ns) / 1e9
        self._e2e.observe(ttft_s + decode_s, exemplar)
        self._prefill_time.observe(prefill_s)
        self._decode_time.observe(decode_s)
        self._inference_time.observe(prefill_s + decode_s)
        if request.output_len > 1:
            self._time_per_output_token.observe(decode_s / (request.output_len - 1))

    def policy(self, policy_id: str, in_force: bool) -> None:
        """The feedback policy now in use ("" for none) and whether it adjusts priorities."""
        self._policy_reloads.inc()
        self._policy_info.clear()
        self._policy_info.labels(**self.labels, policy_id=policy_id).set(1 if in_force else 0)

    def served(
        self,
        *,
        operation: str,
        error_type: str,
        duration_s: float,
        ttft_s: float | None,
        tokens: int,
    ) -> None:
        """The end of an HTTP request, under OpenTelemetry's names. `error_type` "" on success; a
        failed request counts in the duration only."""
        labels = {
            "gen_ai_operation_name": operation,
            "gen_ai_provider_name": PROVIDER,
            "gen_ai_request_model": self.model_name,
        }
        self._otel_duration.labels(**labels, error_type=error_type).observe(duration_s)
        if error_type or ttft_s is None:
            return
        self._otel_ttft.labels(**labels).observe(ttft_s)
        if tokens > 1:
            self._otel_tpot.labels(**labels).observe((duration_s - ttft_s) / (tokens - 1))

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"inferloop:{name}", text, list(self.labels), registry=self.registry)
        return counter.labels(**self.labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"inferloop:{name}", text, list(self.labels), registry=self.registry)
        return gauge.labels(**self.labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"inferloop:{name}", text, list(self.labels), buckets=buckets, registry=self.registry
        )
        return histogram.labels(**self.labels)

    def _array_histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> ArrayHistogram:
        histogram = ArrayHistogram(f"inferloop:{name}", text, buckets, self.labels)
        self.registry.register(histogram)
        return histogram

    def _make_counters(self) -> None:
        counter = self._counter
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._preemptions = counter("num_preemptions", "Preemptions of running requests.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._prompt_tokens_cached = counter("prompt_tokens_cached", "Those not recomputed.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._policy_reloads = counter("policy_reloads", "Changes of the feedback policy.")
        labels = list(self.labels)
        self._success = Counter(
            "inferloop:request_success",
            "Ended requests by reason: stop, length, abort, error.",
            [*labels, "finished_reason"],
            registry=self.registry,
        )
        self._rejections = Counter(
            "inferloop:admission_rejections",
            "Requests refused before they were queued, by reason.",
            [*labels, "reason"],
            registry=self.registry,
        )
        self._policy_info = Gauge(
            "inferloop:policy_in_force",
            "1 if the feedback policy of that id adjusts priorities.",
            [*labels, "policy_id"],
            registry=self.registry,
        )

    def _make_histograms(self) -> None:
        seconds, tokens = self._histogram, self._histogram
        self._inter_token_latency = self._array_histogram(
            "inter_token_latency_seconds", "Gap between a request's tokens.", ITL_BUCKETS
        )
        self._iteration_tokens = self._array_histogram(
            "iteration_tokens_total", "Tokens computed in a step.", STEP_TOKEN_BUCKETS
        )
        self._ttft = seconds("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self._time_per_output_token = seconds(
            "request_time_per_output_token_seconds", "Mean gap of a request.", ITL_BUCKETS
        )
        self._e2e = seconds(
            "e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS
        )
        self._queue_time = seconds(
            "request_queue_time_seconds", "Arrival to first admission.", REQUEST_BUCKETS
        )
        self._prefill_time = seconds(
            "request_prefill_time_seconds", "Admission to first token.", REQUEST_BUCKETS
        )
        self._decode_time = seconds(
            "request_decode_time_seconds", "First to last token.", REQUEST_BUCKETS
        )
        self._inference_time = seconds(
            "request_inference_time_seconds", "Admission to last token.", REQUEST_BUCKETS
        )
        self._request_prompt = tokens("request_prompt_tokens", "Prompt length.", TOKEN_BUCKETS)
        self._request_generation = tokens(
            "request_generation_tokens", "Answer length.", TOKEN_BUCKETS
        )
        self._request_max_tokens = tokens(
            "request_params_max_tokens", "max_tokens asked for.", TOKEN_BUCKETS
        )

    def _make_otel(self) -> None:
        labels = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"]
        self._otel_duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "gen_ai.server.request.duration",
            [*labels, "error_type"],
            buckets=OTEL_DURATION_BUCKETS,
            registry=self.registry,
        )
        self._otel_ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "gen_ai.server.time_to_first_token",
            labels,
            buckets=OTEL_TTFT_BUCKETS,
            registry=self.registry,
        )
        self._otel_tpot = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "gen_ai.server.time_per_output_token",
            labels,
            buckets=OTEL_TPOT_BUCKETS,
            registry=self.registry,
        )


def _exemplar(request: Request) -> dict[str, str]:
    """Names the request, a W3C trace id, beside a bucket it fell into."""
    return {"request_id": request.request_id.hex()}
