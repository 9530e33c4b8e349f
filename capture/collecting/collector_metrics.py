"""The collector's own figures for Prometheus, and its health for whoever supervises it.

`/metrics` and `/health` on a port of their own. The figures are those of `Status`; names start
with `inferloop:collector_`. Not the engine's metrics: those are in `engine.metrics`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from capture.collecting.follower import Status
from capture.errors import CollectorError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "inferloop:collector_"
COMMIT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
COUNTERS = {
    "frames": ("Frames read from rings", "frames"),
    "tokens": ("Output tokens read from rings", "tokens"),
    "lost_frames": ("Frames overwritten before they were read", "lost_frames"),
    "lost_tokens": ("Output tokens overwritten before they were read", "lost_tokens"),
    "torn_frames": ("Frames cut off by the death of their engine", "torn_frames"),
    "commits": ("Transactions committed to the lake", "commits"),
    "failed_commits": ("Attempts at using the lake that failed and are repeated", "failed_commits"),
    "crashes": ("Engines that died without closing their ring", "crashes"),
    "rolled_up_tokens": ("Tokens added to the latency rollup", "rolled_tokens"),
    "dropped_tokens": ("Tokens dropped by retention", "dropped_tokens"),
    "upkeep_runs": ("Pieces of the lake's upkeep begun", "upkeep_runs"),
    "upkeep_failures": ("Pieces of the lake's upkeep that failed", "upkeep_failures"),
    "rings": ("Rings followed since the start", "rings"),
}
GAUGES = {
    "stale_rings": ("Rings of engines that are gone, not yet all in the lake", "stale_rings"),
    "lake_bytes": ("Disk that the lake takes, measured every minute", "lake_bytes"),
    "last_commit_seconds": ("Duration of the last commit", "last_commit_s"),
}
PER_ENGINE = {
    "lag_bytes": "Bytes of an engine's ring that are not yet read",
    "lag_share": "The same as a share of the ring: at 1 the engine overwrites them",
    "rollup_lag_tokens": "Tokens in the lake but not yet in the rollup",
}


class CollectorMetrics:
    """Serves what it was last told; `watch` is the collector's `on_status`."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Histogram

        self._status = Status()
        self._commits = 0
        self._registry = CollectorRegistry()
        self._commit_s = Histogram(
            f"{PREFIX}commit_seconds",
            "Duration of commits to the lake, waiting for it included",
            buckets=COMMIT_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(self)

    def watch(self, status: Status) -> None:
        self._status = status
        if status.commits > self._commits:
            self._commits = status.commits
            self._commit_s.observe(status.last_commit_s)

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment, for the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status
        for name, (text, field) in COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}{name}", text, value=getattr(status, field))
        for name, (text, field) in GAUGES.items():
            yield GaugeMetricFamily(f"{PREFIX}{name}", text, value=getattr(status, field))
        waiting = int(status.waiting_for is not None)
        text = "1 while the lake cannot be used; /health says why"
        yield GaugeMetricFamily(f"{PREFIX}waiting", text, value=waiting)
        engines = status.engines
        for name, text in PER_ENGINE.items():
            family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=["engine_id"])
            for engine in engines:
                family.add_metric([engine.engine_id], getattr(engine, name))
            yield family

    def exposition(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def health(self) -> tuple[bool, dict[str, object]]:
        """Whether rows get into the lake, and what to tell whoever asks."""
        status = self._status
        waiting = status.waiting_for
        return waiting is None, {
            "status": "ok" if waiting is None else "waiting",
            "waiting_for": waiting,
            "rings": len(status.engines),
            "commits": status.commits,
            "lost_tokens": status.lost_tokens,
            "largest_lag_share": max((engine.lag_share for engine in status.engines), default=0.0),
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that went away is no error of the collector."""


class MetricsServer:
    """HTTP in a thread of its own until `close`."""

    def __init__(self, metrics: CollectorMetrics, host: str, port: int) -> None:
        """Raises CollectorError when the port cannot be had."""
        handler = type("Handler", (_Handler,), {"metrics": metrics})
        try:
            self._server = _Server((host, port), handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise CollectorError(
                f"cannot serve metrics on {host}:{port}: {why}. Choose another port with "
                "--metrics-port or INFERLOOP_COLLECTOR_METRICS_PORT"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    metrics: CollectorMetrics
    timeout = 10.0

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            from prometheus_client import CONTENT_TYPE_LATEST

            self._answer(200, CONTENT_TYPE_LATEST, self.metrics.exposition())
        elif path == "/health":
            healthy, told = self.metrics.health()
            self._answer(200 if healthy else 503, "application/json", json.dumps(told).encode())
        else:
            self._answer(404, "text/plain", b"there are /metrics and /health\n")

    def log_message(self, *_: object) -> None:
        """No line for every scrape."""

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
