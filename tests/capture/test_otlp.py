"""Spans and metrics as an OpenTelemetry collector gets them, from a lake, over real HTTP."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from capture.atomic_file import OutputError
from capture.exports import genai
from capture.exports.otlp import OtlpExporter, Target, export_once, follow
from capture.exports.otlp_source import Cursor, after, alone
from capture.exports.selection import ExportError
from capture.frames import TraceWriter
from capture.lake import LakePlace, open_connection
from tests.capture import children
from tests.capture.lakes import commit_rings
from tests.capture.rings import new_ring, write_finish, write_request, write_step
from tests.waiting import PATIENCE_S, until

MS = 1_000_000


class Endpoint:
    """An OTLP endpoint that answers with `answers` in turn, then with 200 and `reply`."""

    def __init__(self, answers: list[int]) -> None:
        self.answers = answers
        self.reply = b""
        self.requests = 0
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                endpoint.requests += 1
                status = endpoint.answers.pop(0) if endpoint.answers else 200
                if status == 200:
                    endpoint.take(self.path, body)
                self.send_response(status)
                reply = endpoint.reply if status == 200 else b""
                self.send_header("Content-Length", str(len(reply)))
                if 300 <= status < 400:
                    self.send_header("Location", "/login")
                self.end_headers()
                self.wfile.write(reply)

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            self.traces.append(ExportTraceServiceRequest.FromString(body))
        elif path == "/v1/metrics":
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))

    def spans(self) -> list[Span]:
        return [
            span
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def serving(*answers: int) -> Iterator[Endpoint]:
    endpoint = Endpoint(list(answers))
    thread = threading.Thread(target=endpoint.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.server.shutdown()
        endpoint.server.server_close()
        thread.join()


def write_requests(home: Path, *, failed: int = 1) -> list[str]:
    """An engine with a request that succeeds, slowly once, and `failed` others; their ids."""
    ring = new_ring(home / "rings")
    trace = TraceWriter(ring)
    trace.engine({"model": "tiny", "fingerprint": "f00d"})
    now = time.monotonic_ns()
    ids = [write_request(trace, 0, arrival_ns=now, prompt_tokens=100, cached_tokens=64)]
    for position in range(10):
        waited_ms = 300.0 if position == 5 else 20.0
        end = now + (200 + 20 * position + (280 if position >= 5 else 0)) * MS
        write_step(
            trace,
            position,
            1,
            phase=1 if position == 0 else 0,
            position=position,
            latency_us=waited_ms * 1000,
            start_ns=end - 3 * MS,
        )
    trace.event(kind="preempted", request_id=bytes.fromhex(ids[0]), slot=0, detail="no blocks")
    times = {"admitted": 100, "first_token": 200, "last_token": 660, "flushed": 700}
    ended = {f"{name}_ns": now + at * MS for name, at in times.items()}
    write_finish(trace, 0, output_tokens=10, **ended)
    for slot in range(1, 1 + failed):
        ids.append(write_request(trace, slot, arrival_ns=now))
        nothing = {"admitted_ns": 0, "first_token_ns": 0, "last_token_ns": 0, "flushed_ns": 0}
        write_finish(trace, slot, reason="timeout", output_tokens=0, **nothing)
    ring.close()
    return ids


class Trace(NamedTuple):
    ids: list[str]
    home: Path
    place: LakePlace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A lake that tests read: a request that succeeded and one that failed."""
    home = tmp_path_factory.mktemp("home")
    return Trace(write_requests(home), home, commit_rings(home))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def send(
    place: LakePlace,
    url: str,
    cursor: Cursor,
    timeout_s: float = PATIENCE_S,
    say: Callable[[str], None] = print,
) -> Cursor:
    with open_connection(place) as lake:
        exporter = OtlpExporter(lake, Target(url, timeout_s), say)
        try:
            return export_once(exporter, cursor, lambda _: None)
        finally:
            exporter.close()


def attributes(entries: Any) -> dict[str, Any]:
    values = {}
    for entry in entries:
        kind = entry.value.WhichOneof("value")
        value = getattr(entry.value, kind)
        values[entry.key] = (
            [getattr(item, item.WhichOneof("value")) for item in value.values]
            if kind == "array_value"
            else value
        )
    return values


def test_a_request_is_a_server_span_with_its_phases_below(trace: Trace) -> None:
    with serving() as endpoint:
        send(trace.place, endpoint.url, Cursor())
    spans = {span.name: span for span in endpoint.spans() if span.trace_id.hex() == trace.ids[0]}
    assert set(spans) == {"chat tiny", "queue", "prefill", "decode", "send"}
    root = spans["chat tiny"]
    assert root.kind == Span.SPAN_KIND_SERVER
    assert root.parent_span_id == b""
    assert root.end_time_unix_nano - root.start_time_unix_nano == 700 * MS
    lasted = {
        name: (span.end_time_unix_nano - span.start_time_unix_nano) // MS
        for name, span in spans.items()
        if span.parent_span_id == root.span_id
    }
    assert lasted == {"queue": 100, "prefill": 100, "decode": 460, "send": 40}
    found = attributes(root.attributes)
    assert found == found | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "inferloop",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.2,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "inferloop.tenant": "acme",
    }
    slow, preempted = sorted(root.events, key=lambda event: event.name, reverse=True)
    assert (slow.name, preempted.name) == ("inferloop.slow_token", "inferloop.preempted")
    told = attributes(slow.attributes)
    assert (told["inferloop.token.position"], told["inferloop.token.latency_ms"]) == (5, 300.0)


def test_a_failed_request_is_an_error_and_counts_in_no_latency_but_duration(trace: Trace) -> None:
    with serving() as endpoint:
        send(trace.place, endpoint.url, Cursor())
    (span,) = (span for span in endpoint.spans() if span.trace_id.hex() == trace.ids[1])
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert attributes(span.attributes)["error.type"] == "timeout"
    (sent,) = endpoint.metrics
    (resource,) = sent.resource_metrics
    assert attributes(resource.resource.attributes)["service.name"] == "inferloop"
    (scope,) = resource.scope_metrics
    metrics = {metric.name: metric for metric in scope.metrics}
    points = {
        name: [(point.count, point.sum, list(point.explicit_bounds)) for point in data]
        for name, metric in metrics.items()
        for data in [metric.histogram.data_points]
    }
    assert all(metric.unit == "s" for metric in metrics.values())
    assert all(
        metric.histogram.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
        for metric in metrics.values()
    )
    first, per_token = points[genai.TIME_TO_FIRST_TOKEN], points[genai.TIME_PER_OUTPUT_TOKEN]
    assert first == [(1, pytest.approx(0.2), list(genai.TIME_TO_FIRST_TOKEN_BUCKETS))]
    assert per_token == [(1, pytest.approx(0.46 / 9), list(genai.TIME_PER_OUTPUT_TOKEN_BUCKETS))]
    durations = metrics[genai.REQUEST_DURATION].histogram.data_points
    errors = [attributes(point.attributes).get("error.type") for point in durations]
    assert sorted(errors, key=str) == [None, "timeout"]


def test_an_endpoint_that_is_busy_gets_everything_once(home: Path) -> None:
    ids = write_requests(home, failed=4)
    place = commit_rings(home)
    with serving(503) as endpoint:
        cursor = send(place, endpoint.url, Cursor())
        assert sorted({span.trace_id.hex() for span in endpoint.spans()}) == sorted(ids)
        assert len(endpoint.traces) == 1
        send(place, endpoint.url, cursor)
        assert len(endpoint.traces) == 1, "nothing is sent twice"
        write_requests(home, failed=0)
        commit_rings(home)
        send(place, endpoint.url, cursor)
        assert len(endpoint.traces) == 2
        assert len(endpoint.spans()) == 5 + 4 + 5


def test_what_was_not_confirmed_is_sent_again_as_the_same_spans(trace: Trace) -> None:
    with serving() as endpoint:
        send(trace.place, endpoint.url, Cursor())
        once = {span.span_id for span in endpoint.spans()}
        send(trace.place, endpoint.url, Cursor())
        assert {span.span_id for span in endpoint.spans()} == once


def test_a_request_whose_arrival_was_lost_does_not_stop_the_others(home: Path) -> None:
    ids = write_requests(home, failed=3)
    place = commit_rings(home)
    with open_connection(place, read_only=False) as writer:
        writer.execute("DELETE FROM requests WHERE slot < 2")
    with serving() as endpoint:
        send(place, endpoint.url, Cursor())
    assert sorted({span.trace_id.hex() for span in endpoint.spans()}) == sorted(ids[2:])


def test_a_refusal_is_clear_and_moves_no_cursor(trace: Trace) -> None:
    with serving(401) as endpoint, pytest.raises(ExportError, match=r"spans of 2 requests .*401"):
        send(trace.place, endpoint.url, Cursor())
    with serving(200, 400) as endpoint, pytest.raises(ExportError, match=r"metrics of 2 req.*400"):
        send(trace.place, endpoint.url, Cursor())
    with serving(302) as endpoint, pytest.raises(ExportError, match=r"spans of 2 requests .*302"):
        send(trace.place, endpoint.url, Cursor())


def test_what_an_endpoint_rejects_for_good_is_said_and_not_sent_again(trace: Trace) -> None:
    said: list[str] = []
    with serving() as endpoint:
        answer = ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = 3
        answer.partial_success.error_message = "too\x1b[2J old"
        endpoint.reply = answer.SerializeToString()
        send(trace.place, endpoint.url, Cursor(), say=said.append)
        endpoint.reply = b"<html>"
        send(trace.place, endpoint.url, Cursor(), say=said.append)
        assert endpoint.requests == 4
    assert said == [
        f"{endpoint.url} rejected 3 of the spans for good: too [2J old",
        f"{endpoint.url} rejected 3 of the metrics for good: too [2J old",
    ]


def test_an_endpoint_that_hangs_costs_its_timeout(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(ExportError, match="did not take the spans of 2 requests"):
            send(trace.place, url, Cursor(), timeout_s=0.5)
    assert time.monotonic() - started < 60


def test_two_engines_that_finish_in_one_microsecond_are_exported_once_each(home: Path) -> None:
    ids = write_requests(home, failed=3) + write_requests(home, failed=3)
    place = commit_rings(home)
    with open_connection(place, read_only=False) as writer:
        writer.execute("UPDATE finishes SET finished_at = TIMESTAMP '2026-11-29 14:00:00'")
    with open_connection(place) as lake:
        cursor, seen = Cursor(), []
        while rows := after(lake, cursor, 3):
            seen += [row["request_id"] for row in rows]
            cursor = cursor.take(rows)
    assert sorted(seen) == sorted(ids)


def test_a_second_export_to_one_endpoint_is_kept_away(home: Path) -> None:
    file = Target("http://localhost:4318").cursor_file(home)
    with alone(file):
        with pytest.raises(ExportError, match=rf"pid {os.getpid()}.* is at work"), alone(file):
            pass
        with alone(Target("http://localhost:4319").cursor_file(home)):
            pass
    with alone(file):
        pass


def test_following_outlives_a_full_disk_and_a_lake_that_cannot_be_read(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was sent is not sent again because its cursor could not be kept."""
    stop, said, kept = threading.Event(), [], []
    troubles = [OutputError("cannot write cursor: No space left on device")]

    def keep(cursor: Cursor) -> None:
        if troubles:
            raise troubles.pop()
        kept.append(cursor)
        stop.set()

    monkeypatch.setattr("capture.exports.otlp.POLL_S", 0.01)
    with serving() as endpoint, open_connection(trace.place) as lake:
        exporter = OtlpExporter(lake, Target(endpoint.url), said.append)
        with monkeypatch.context() as broken, open_connection(trace.place) as closed:
            closed.close()
            broken.setattr(exporter, "_lake", closed)

            def tell(text: str) -> None:
                said.append(text)
                exporter._lake = lake

            follow(exporter, Cursor(), keep, stop, tell)
        exporter.close()
        assert endpoint.requests == 2
    assert len(kept) == 1
    assert [line.partition(":")[0] for line in said] == [
        "cannot read the lake",
        "cannot write cursor",
    ]


def command(home: Path, *arguments: str) -> subprocess.Popen[str]:
    return children.started(
        [sys.executable, "-m", "cli", "export", "otlp", *arguments],
        env={**os.environ, "INFERLOOP_HOME": str(home)},
        stderr=subprocess.PIPE,
    )


def test_an_endpoint_that_is_down_fails_the_command_with_one_line(trace: Trace) -> None:
    down = command(trace.home, "--endpoint", "http://127.0.0.1:1", "--timeout", "1")
    _, errors = down.communicate(timeout=PATIENCE_S)
    assert down.returncode == 1
    (line,) = errors.splitlines()
    assert line.startswith("inferloop: http://127.0.0.1:1 did not take the spans of 2 requests (")
    assert "refused" in line
    assert "stay in the lake" in line


@pytest.mark.kill
def test_following_outlives_an_endpoint_that_is_down(home: Path) -> None:
    """It waits in the lake, goes out when the endpoint is back, and not again after a restart."""
    ids = write_requests(home)
    place = commit_rings(home)
    with serving(404) as endpoint:  # from a gateway in front; the SDK itself repeats after a 503
        arguments = ("--endpoint", endpoint.url, "--follow", "--timeout", str(PATIENCE_S))
        following = command(home, *arguments)
        assert following.stderr is not None
        assert "trying again in 2 s" in following.stderr.readline()
        until(lambda: endpoint.metrics, "the requests that had waited")
        more = write_requests(home)
        commit_rings(home)
        until(lambda: len(endpoint.metrics) > 1, "those that came later")
        cursor = Target(endpoint.url).cursor_file(home)
        until(lambda: len(json.loads(cursor.read_text())) == 2, "a cursor for both engines")
        following.send_signal(signal.SIGTERM)
        assert following.wait(PATIENCE_S) == 0
        sent = endpoint.requests
        send(place, endpoint.url, Cursor.load(cursor))
        assert endpoint.requests == sent
    sent = [span.trace_id.hex() for span in endpoint.spans() if not span.parent_span_id]
    assert sorted(sent) == sorted(ids + more)


def test_an_endpoint_that_is_no_url_and_a_damaged_cursor_are_named(home: Path) -> None:
    with pytest.raises(ExportError, match="write http://HOST:4318"):
        Target("localhost:4318")
    with pytest.raises(ExportError, match=r"is added: write http://localhost:4318\Z"):
        Target("http://localhost:4318/v1/traces")
    file = Target("http://localhost:4318/").cursor_file(home)
    assert file == Target("http://localhost:4318").cursor_file(home)
    file.parent.mkdir()
    file.write_text("{")
    with pytest.raises(ExportError, match="remove the file to start again"):
        Cursor.load(file)


def test_the_names_are_those_of_the_conventions() -> None:
    names = {
        value for name, value in vars(genai).items() if name.isupper() and isinstance(value, str)
    }
    assert names == {
        "chat",
        "error.type",
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.max_tokens",
        "gen_ai.request.model",
        "gen_ai.response.finish_reasons",
        "gen_ai.response.model",
        "gen_ai.response.time_to_first_chunk",
        "gen_ai.server.request.duration",
        "gen_ai.server.time_per_output_token",
        "gen_ai.server.time_to_first_token",
        "gen_ai.usage.cache_read.input_tokens",
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens",
        "inferloop",
        "s",
        "server.address",
        "text_completion",
    }
