"""Metrics: which requests count where, exemplars that name requests, and the format scraped."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from engine.exposition import render
from engine.histogram import ArrayHistogram
from engine.metrics import ITL_BUCKETS, REQUEST_BUCKETS, TTFT_BUCKETS
from tests.engine.live_server import TEXT, LiveServer, body, live_server

OPENMETRICS = "application/openmetrics-text"
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
VLLM_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
            10.0, 20.0, 40.0, 80.0)  # fmt: skip
VLLM_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
             10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
VLLM_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
                120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip


def exposed(server: LiveServer) -> dict[str, list]:
    """Samples by name, of the OpenMetrics text."""
    answer = server.client.get("/metrics", headers={"accept": PROMETHEUS})
    assert answer.headers["content-type"].startswith(OPENMETRICS)
    samples: dict[str, list] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def count(samples: dict[str, list], name: str) -> float:
    return sum(sample.value for sample in samples[f"{name}_count"])


def test_latency_histograms_name_requests() -> None:
    with live_server() as server:
        answer = server.client.post(TEXT, json=body())
        request_id = answer.headers["x-request-id"]
        server.record()
        samples = exposed(server)
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        buckets = samples[f"inferloop:{name}_seconds_bucket"]
        named = [sample for sample in buckets if sample.exemplar is not None]
        assert named, name
        for sample in named:
            assert sample.exemplar.labels == {"request_id": request_id}
            assert sample.exemplar.value <= float(sample.labels["le"])


def test_a_failed_request_counts_in_duration_and_in_no_latency() -> None:
    with live_server() as server:
        server.runner.script = [65, 66, 5000]  # the third token does not exist: the request fails
        assert server.client.post(TEXT, json=body()).status_code == 500
        server.record()
        samples = exposed(server)
    for name in (
        "inferloop:time_to_first_token_seconds",
        "inferloop:request_time_per_output_token_seconds",
        "inferloop:e2e_request_latency_seconds",
    ):
        assert count(samples, name) == 0, name
    assert "gen_ai_server_time_to_first_token_seconds_count" not in samples
    (duration,) = samples["gen_ai_server_request_duration_seconds_count"]
    assert duration.labels["error_type"] == "step_failed"
    assert duration.value == 1
    reasons = {
        s.labels["finished_reason"]: s.value for s in samples["inferloop:request_success_total"]
    }
    assert reasons == {"error": 1}


@pytest.mark.parametrize(
    ("ours", "vllms"),
    [(ITL_BUCKETS, VLLM_ITL), (TTFT_BUCKETS, VLLM_TTFT), (REQUEST_BUCKETS, VLLM_REQUEST)],
)
def test_buckets_include_vllms_and_resolve_milliseconds(
    ours: tuple[float, ...], vllms: tuple[float, ...]
) -> None:
    assert set(vllms) <= set(ours)
    assert list(ours) == sorted(ours)


def test_a_token_of_three_milliseconds_is_told_from_one_of_five() -> None:
    assert len([bound for bound in ITL_BUCKETS if 0.003 <= bound <= 0.005]) >= 3


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (PROMETHEUS, True),
        (OPENMETRICS, True),
        ("application/openmetrics-text; version=nonsense", True),
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x, text/plain", False),
        (";;;,,=", False),
    ],
)
def test_the_format_is_the_one_asked_for(accept: str, openmetrics: bool) -> None:
    registry = CollectorRegistry()
    data, kind = render(registry, accept)
    assert kind.startswith(OPENMETRICS) == openmetrics
    assert data.endswith(b"# EOF\n") == openmetrics


def test_a_bucket_gets_a_new_exemplar_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(
        "engine.histogram.time", SimpleNamespace(monotonic=lambda: now_s, time=time.time)
    )
    histogram = ArrayHistogram("inferloop:x_seconds", "X.", (1.0,), {"engine": "0"})
    named = []

    def observe(value: float, name: str) -> None:
        histogram.observe(np.array([value]), lambda _: named.append(name) or {"request_id": name})

    observe(0.5, "first")
    observe(0.6, "too soon")
    observe(2.0, "other bucket")
    now_s += 1
    observe(0.7, "later")
    assert named == ["first", "other bucket", "later"]


def test_plain_text_has_no_exemplars() -> None:
    histogram = ArrayHistogram("inferloop:x_seconds", "X.", (1.0, 2.0), {"engine": "0"})
    histogram.observe(np.array([0.5, 9.0, 1.5]), lambda index: {"request_id": "xaby"[index:][:2]})
    registry = CollectorRegistry()
    registry.register(histogram)
    plain = render(registry, "")[0].decode()
    assert "ab" not in plain
    (family,) = parse_plain(plain)
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert buckets == {"1.0": 1, "2.0": 2, "+Inf": 3}
    (family,) = text_string_to_metric_families(render(registry, OPENMETRICS)[0].decode())
    named = {s.labels["le"]: s.exemplar for s in family.samples if s.exemplar is not None}
    assert named["+Inf"].labels == {"request_id": "ab"}
    assert list(named) == ["+Inf"]
