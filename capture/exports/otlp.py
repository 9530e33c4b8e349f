"""Sending finished requests to an OpenTelemetry collector, from where the last export ended.

At least once: the cursor moves only after the endpoint took spans and metrics. What cannot be sent
waits in the lake, so an endpoint that is down costs neither memory nor data. Prompts and answers
are not in the lake and never exported.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.trace.export import SpanExportResult

from capture.console.output import one_line
from capture.errors import CaptureError
from capture.exports.otlp_metrics import Histograms
from capture.exports.otlp_source import Cursor, NewCommits, Row, after, after_new, events_of
from capture.exports.otlp_spans import resource_of, spans_of
from capture.exports.selection import ExportError

if TYPE_CHECKING:
    import duckdb

BATCH_REQUESTS = 500
POLL_S = 2.0
LONGEST_WAIT_S = 60.0
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([\w ]+)")


@dataclass(frozen=True)
class Target:
    """An OTLP/HTTP endpoint, without the signal's path; `timeout_s` for a request with retries."""

    endpoint: str
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ExportError(
                f"the endpoint {self.endpoint!r} is no URL: write http://HOST:4318 (OTLP over HTTP)"
            )
        base, _, signal = self.endpoint.rstrip("/").rpartition("/v1/")
        if signal in ("traces", "metrics"):
            raise ExportError(
                f"the endpoint {self.endpoint!r} has a signal's path, which is added: write {base}"
            )

    def cursor_file(self, home: Path) -> Path:
        """Where it is kept how far the export to this endpoint is."""
        base = self.endpoint.rstrip("/")
        digest = hashlib.blake2s(base.encode(), digest_size=6).hexdigest()
        return home / "exports" / f"otlp-{digest}.json"


class OtlpExporter:
    """Sends batches of finished requests to one endpoint. Not for several threads."""

    def __init__(
        self, lake: duckdb.DuckDBPyConnection, target: Target, say: Callable[[str], None]
    ) -> None:
        """`say` is told what the endpoint took a batch without."""
        base = target.endpoint.rstrip("/")
        self.requests = 0
        self._lake = lake
        self._base = base
        self._say = say
        self._histograms = Histograms()
        self._sessions = {"spans": _Session(), "metrics": _Session()}
        self._spans = OTLPSpanExporter(
            endpoint=f"{base}/v1/traces",
            timeout=target.timeout_s,
            compression=Compression.Gzip,
            session=self._sessions["spans"],
        )
        self._metrics = OTLPMetricExporter(
            endpoint=f"{base}/v1/metrics",
            timeout=target.timeout_s,
            compression=Compression.Gzip,
            session=self._sessions["metrics"],
        )

    def send_after(
        self, cursor: Cursor, start: datetime | None = None, end: datetime | None = None
    ) -> Cursor | None:
        """Send the batch after `cursor`; the new cursor, None when there was nothing.

        Raises ExportError when the endpoint did not take it; the same call tries again.
        """
        return self._send_rows(cursor, after(self._lake, cursor, BATCH_REQUESTS, start, end))

    def send_new(self, cursor: Cursor, commits: NewCommits) -> Cursor | None:
        """`send_after` that looks only at the commits that it has not seen through before."""
        rows = after_new(self._lake, cursor, BATCH_REQUESTS, commits)
        moved = self._send_rows(cursor, rows)
        if len(rows) < BATCH_REQUESTS:
            commits.done()
        return moved

    def _send_rows(self, cursor: Cursor, rows: list[Row]) -> Cursor | None:
        if not rows:
            return None
        whole = [row for row in rows if row["request_id"] is not None]
        if whole:
            self._send(whole)
        self.requests += len(whole)
        return cursor.take(rows)

    def _send(self, rows: list[Row]) -> None:
        events = events_of(self._lake, rows)
        resources = {row["engine_id"]: resource_of(row) for row in rows}
        spans = []
        for row in rows:
            key = (row["engine_id"], row["slot"])
            spans += spans_of(row, events.get(key, []), resources[row["engine_id"]])
        with _quiet():
            if self._spans.export(spans) is not SpanExportResult.SUCCESS:
                raise self._failed("spans", len(rows))
            self._say_rejected("spans", ExportTraceServiceResponse())
            histograms = self._histograms.with_rows(rows)
            if self._metrics.export(histograms.data()) is not MetricExportResult.SUCCESS:
                raise self._failed("metrics", len(rows))
            self._say_rejected("metrics", ExportMetricsServiceResponse())
        self._histograms = histograms

    def close(self) -> None:
        self._spans.shutdown()  # type: ignore[no-untyped-call]
        self._metrics.shutdown()

    def _say_rejected(
        self, what: str, answer: ExportTraceServiceResponse | ExportMetricsServiceResponse
    ) -> None:
        """A part that the endpoint refuses for good; the protocol forbids to send it again."""
        with suppress(DecodeError):
            answer.ParseFromString(self._sessions[what].answer)
        for field, value in answer.partial_success.ListFields():
            if field.name.startswith("rejected") and value:
                reason = one_line(answer.partial_success.error_message or "without a reason")
                self._say(f"{self._base} rejected {value:,} of the {what} for good: {reason}")

    def _failed(self, what: str, requests: int) -> ExportError:
        return ExportError(
            f"{self._base} did not take the {what} of {requests} requests "
            f"({self._sessions[what].last}); they stay in the lake and are sent next time"
        )


def export_once(
    exporter: OtlpExporter,
    cursor: Cursor,
    keep: Callable[[Cursor], None],
    start: datetime | None = None,
    end: datetime | None = None,
) -> Cursor:
    """Send all there is; `keep` is called with the cursor after each batch. Raises ExportError."""
    while (moved := exporter.send_after(cursor, start, end)) is not None:
        cursor = moved
        keep(cursor)
    return cursor


def follow(
    exporter: OtlpExporter,
    cursor: Cursor,
    keep: Callable[[Cursor], None],
    stop: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Send what is there and what comes, until `stop`; a failure is said, and tried again."""
    wait_s, kept = POLL_S, cursor
    commits = NewCommits()
    while not stop.is_set():
        try:
            moved = exporter.send_new(cursor, commits)
            cursor = moved or cursor
            if cursor is not kept:
                keep(cursor)
                kept = cursor
        except CaptureError as error:  # the endpoint, the lake's database, or a full disk
            say(f"{error}; trying again in {wait_s:.0f} s")
            stop.wait(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            continue
        wait_s = POLL_S
        if moved is None:
            stop.wait(POLL_S)


class _Session(requests.Session):
    """An HTTP session that remembers how its last request went: the SDK's exporters do not say."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "no answer"
        self.answer = b""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        options["allow_redirects"] = False  # a login page would take everything
        try:
            response = super().send(request, **options)
        except requests.RequestException as error:
            found = _SYSTEM_ERROR.search(str(error))
            self.last = found[1] if found is not None else type(error).__name__
            raise
        self.last = f"HTTP {response.status_code} {response.reason}"
        self.answer = response.content
        if 300 <= response.status_code < 400:
            response.status_code = HTTPStatus.MISDIRECTED_REQUEST  # the SDK takes it for a success
        return response


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the SDK's own log lines: what matters of them is in our errors."""
    logger = logging.getLogger("opentelemetry.exporter.otlp")
    propagated, logger.propagate = logger.propagate, False
    handler = logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
